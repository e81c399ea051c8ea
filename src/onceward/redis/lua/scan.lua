-- One step through the keys of this server, which finds records in some states, up to an age. It reads as many keys as
-- a step is asked for, so that nobody waits long.
-- ARGV: the cursor, a pattern, how many keys, the letters of the states, the latest time in microseconds (-1: any).
-- Back: the cursor, and for each record that was found its time and its key.
local letters, latest = ARGV[4], tonumber(ARGV[5])
local step = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local found = { step[1] }
for _, key in ipairs(step[2]) do
    local state, time = age(key)
    if state and string.find(letters, state, 1, true) and (latest < 0 or time <= latest) then
        found[#found + 1] = time
        found[#found + 1] = key
    end
end
return found
