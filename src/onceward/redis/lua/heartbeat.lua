-- Have the leases for their whole time again.
-- ARGV: the lease in microseconds, and the token of each. Back: 1 for each that is still ours, else 0.
local ends = struct.pack('>I7', now() + tonumber(ARGV[1]))
local replies = {}
for place, key in ipairs(KEYS) do
    if has(redis.call('GETRANGE', key, 0, 7), 'r', tonumber(ARGV[1 + place])) then
        redis.call('SETRANGE', key, 8, ends)
        replies[place] = 1
    else
        replies[place] = 0
    end
end
return replies
