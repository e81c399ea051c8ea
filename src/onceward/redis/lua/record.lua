-- Stands in front of every script: the places of a record's string that scripts look at. value.py has the table.
-- Numbers are doubles here: microseconds since 1970 are exact in them until the year 2255.

local function now()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

local function front(state, fence, at, attempts, started)
    return state .. struct.pack('>I7I7I2I2', fence, at, math.min(attempts, 65535), math.max(0, math.min(started, 65535)))
end

-- fence, at, attempts, started
local function numbers(value)
    return struct.unpack('>I7I7I2I2', value, 2)
end

-- Whether it is in this state with this token.
local function has(value, state, fence)
    return value and string.sub(value, 1, 8) == state .. struct.pack('>I7', fence)
end

-- Of a record that is not processed: when it was received, as it is packed.
local function received(value)
    return string.sub(value, 20, 26)
end

-- And what stands before its columns: the name of its claim while it runs, or why it was buried by complete.lua.
local function note(value)
    return string.sub(value, 28, 27 + string.byte(value, 27))
end

local function noted(text)
    text = string.sub(text, 1, 255)
    return string.char(#text) .. text
end

local function claimed_by(value, claim)
    return string.sub(value, 1, 1) == 'r' and note(value) == claim
end

local function columns(value)
    if string.sub(value, 1, 1) == 'p' then
        return string.sub(value, 21)
    end
    return string.sub(value, 28 + string.byte(value, 27))
end

-- Write without a change. Who waits for replicas waits for writes of its own connection only; and what has to be refused,
-- because memory is full, is refused here, before anything else has happened.
local function touch(key, value)
    redis.call('SETRANGE', key, 0, string.sub(value, 1, 1))
end
