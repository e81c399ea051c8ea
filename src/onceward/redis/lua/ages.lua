-- Stands in front of scripts that go through keys. They read the beginning of a record only, as others may be large, and
-- pass over what is none: a key of somebody else's, or one that is just moving to another server.
local LETTERS = 'rpfdxa'

-- The state, and when it was processed, or else received; and whether it is kept for a time of its own.
local function age(key)
    local value = redis.pcall('GETRANGE', key, 0, 25)
    if type(value) ~= 'string' or #value < 20 then
        return nil
    end
    local state = string.sub(value, 1, 1)
    if not string.find(LETTERS, state, 1, true) then
        return nil
    end
    if state == 'p' then
        return state, (struct.unpack('>I7', value, 9)), string.byte(value, 20) == 1
    end
    if #value < 26 then
        return nil
    end
    return state, (struct.unpack('>I7', value, 20)), false
end
