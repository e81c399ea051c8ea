-- One step through the keys of this server, which finds whose they are.
-- ARGV: the cursor, a pattern, how many keys. Back: the cursor, and one key of each consumer that was met.
local step = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local known, found = {}, {}
for _, key in ipairs(step[2]) do
    local consumer = string.match(key, '^[^:]*:([^:]*):')
    if consumer and not known[consumer] then
        known[consumer] = true
        found[#found + 1] = key
    end
end
return { step[1], found }
