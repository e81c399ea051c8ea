-- One step through the keys of this server, which counts records by state and age.
-- ARGV: the cursor, a pattern, how many keys. Back: the cursor, and for each state that was met: its letter, how many
-- records, of the last day, of the last hour, the time of the oldest.
local hour = 3600 * 1000000
local time = now()
local step = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local counts = {}
for _, key in ipairs(step[2]) do
    local state, when = age(key)
    if state then
        local count = counts[state] or { state, 0, 0, 0, when }
        counts[state] = count
        count[2] = count[2] + 1
        count[3] = count[3] + (when > time - 24 * hour and 1 or 0)
        count[4] = count[4] + (when > time - hour and 1 or 0)
        count[5] = math.min(count[5], when)
    end
end
local found = { step[1] }
for _, count in pairs(counts) do
    found[#found + 1] = count
end
return found
