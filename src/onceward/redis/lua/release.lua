-- Give messages back as if they had never been claimed, where the claim is still the current one.
-- ARGV, for each: its token (0: nobody heard it), the name of its claim, and the record as it was before ('': none).
for place, key in ipairs(KEYS) do
    local fence, claim, before = tonumber(ARGV[3 * place - 2]), ARGV[3 * place - 1], ARGV[3 * place]
    local value = redis.call('GET', key)
    if has(value, 'r', fence) or (value and fence == 0 and claimed_by(value, claim)) then
        redis.call('DEL', key) -- which is never refused, and then neither is the other
        if before ~= '' then
            redis.call('SET', key, before)
        end
    end
end
return 1
