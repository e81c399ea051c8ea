-- Take over a record that has failed, whose runner is gone, or that is replayed: only if it is as it was seen. Its
-- columns stay, until it is known how this run ends.
-- ARGV: the name of the claim, the lease in microseconds, whether it counts as a start, the front as it was seen.
-- Back: the token, or 0.
local claim, lease, counted, seen = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local value = redis.call('GET', KEYS[1])
if not value then
    return 0
end
local fence, _, attempts, started = numbers(value)
if claimed_by(value, claim) then
    touch(KEYS[1], value)
    return fence
end
if string.sub(value, 1, #seen) ~= seen then
    return 0
end
local time = now()
fence = math.max(time, fence + 1)
redis.call('SET', KEYS[1], front('r', fence, time + lease, attempts, started + counted)
    .. received(value) .. noted(claim) .. columns(value))
return fence
