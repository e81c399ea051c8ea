-- Delete what was processed up to a time and has none of its own. ARGV: the time in microseconds, and 1 to delete, 0 to count.
-- Back: how many there are.
local latest, deletes = tonumber(ARGV[1]), ARGV[2] == '1'
local number = 0
for _, key in ipairs(KEYS) do
    local state, time, own_time = age(key)
    if state == 'p' and time <= latest and not own_time then
        number = number + 1
        if deletes then
            redis.call('UNLINK', key)
        end
    end
end
return number
