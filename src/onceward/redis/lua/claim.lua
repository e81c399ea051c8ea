-- Claim messages: each record that is not there is made, running, with a lease. One that is there is given back as it
-- is, for the client to judge, except where this very claim made it: then the client asks again because it did not
-- hear the answer.
-- ARGV: the name of the claim, the lease in microseconds, whether it counts as a start, whether replicas are waited for,
-- and the columns of each.
-- Back: the time, and for each its token, or the record that is there.
local claim, lease, counted, waits = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'
local time = now()
local mine = front('r', time, time + lease, 0, counted) .. struct.pack('>I7', time) .. noted(claim)
local replies = { time }
for place, key in ipairs(KEYS) do
    local value = redis.call('GET', key)
    if not value then
        redis.call('SET', key, mine .. ARGV[4 + place])
        replies[place + 1] = time
    elseif claimed_by(value, claim) then
        touch(key, value)
        replies[place + 1] = (numbers(value))
    else
        if waits then
            touch(key, value)
        end
        replies[place + 1] = value
    end
end
return replies
