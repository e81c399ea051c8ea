-- Write the columns of a dead letter anew: a command of its handler failed after others had been applied, and here it
-- is said which. ARGV: its token, the columns.
local value = redis.call('GET', KEYS[1])
if has(value, 'd', tonumber(ARGV[1])) then
    redis.call('SET', KEYS[1], string.sub(value, 1, 26) .. '\0' .. ARGV[2])
end
return 1
