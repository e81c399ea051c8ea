-- Write down how a run ended that did not succeed, if its token is still the current one.
-- ARGV: the token, whether the claim counted as a start, the state, attempts to add, microseconds until the next try
-- (-1: none is set), the columns. Back: the time of the next try or of the end, or -1: it is somebody else's.
local fence, counted, state, more = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local delay, new = tonumber(ARGV[5]), ARGV[6]
local value = redis.call('GET', KEYS[1])
if has(value, state, fence) then
    touch(KEYS[1], value)
    return (select(2, numbers(value))) -- done before: the client did not hear the answer
end
if not has(value, 'r', fence) then
    return -1
end
local _, _, attempts, started = numbers(value)
local at = now()
if state == 'f' then
    at = delay >= 0 and at + delay or 0
end
redis.call('SET', KEYS[1], front(state, fence, at, attempts + more, started - counted) .. received(value) .. '\0' .. new)
return at
