-- A dead letter that will never run: its payload goes. ARGV: the front as it was seen, the columns without the payload.
-- Back: 1, or 0 if it has changed.
local seen, new = ARGV[1], ARGV[2]
local value = redis.call('GET', KEYS[1])
if not value then
    return 0
end
if string.sub(value, 1, #seen) == 'x' .. string.sub(seen, 2) then
    touch(KEYS[1], value)
    return 1 -- done before: the client did not hear the answer
end
if string.sub(value, 1, #seen) ~= seen then
    return 0
end
redis.call('SET', KEYS[1], 'x' .. string.sub(value, 2, 26) .. '\0' .. new)
return 1
