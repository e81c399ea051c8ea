-- The time, and the records as they are.
local replies = { now() }
for place, key in ipairs(KEYS) do
    replies[place + 1] = redis.call('GET', key)
end
return replies
