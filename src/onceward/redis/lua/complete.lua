-- Complete messages: apply the commands of each, and write that it is processed, if its token is still the current one.
-- ARGV: whether it is all or none of them, whether their claims counted as starts, and for each: its token, how long
-- it is kept in milliseconds, 1 if that is a time of its own, its columns ('' as they are), its commands packed ('' none).
-- Back, for each: when it was processed; 0 if the lease is lost; -1 if it is left alone because another one is lost;
-- or, when a command failed, how many had been applied before it and what the server said.
local together, counted = ARGV[1] == '1', tonumber(ARGV[2])
local time = now()
local number = (#ARGV - 2) / 5 -- of messages; the other keys are those of their commands
local values, replies, lost = {}, {}, false
for place = 1, number do
    local key = KEYS[place]
    local value, fence = redis.call('GET', key), tonumber(ARGV[5 * place - 2])
    values[place] = value
    if has(value, 'p', fence) then
        touch(key, value)
        replies[place] = (select(2, numbers(value))) -- done before: the client did not hear the answer
    elseif has(value, 'd', fence) and note(value) ~= '' then
        touch(key, value)
        local applied, said = string.match(note(value), '^(%d+) (.*)$')
        replies[place] = { tonumber(applied), said } -- buried before
    elseif not has(value, 'r', fence) then
        replies[place], lost = 0, true
    end
end

-- A command that fails leaves the ones before it. Then nobody can say what is done: it is dead, in the same moment.
local function apply(packed)
    for number, command in ipairs(cmsgpack.unpack(packed)) do
        -- Both: what the server refuses is an answer; what Lua refuses would end the script with the commands before it
        -- applied, and nobody told.
        local went, reply = pcall(function() return redis.pcall(unpack(command)) end)
        if not went then
            return { number - 1, tostring(reply) }
        end
        if type(reply) == 'table' and reply.err then
            return { number - 1, reply.err }
        end
    end
end

local function write(place, state, why)
    local value, new = values[place], ARGV[5 * place + 1]
    local fence, _, attempts, started = numbers(value)
    if new == '' then
        new = columns(value)
    end
    if state == 'p' then
        redis.call('SET', KEYS[place], front('p', fence, time, attempts + 1, started - counted)
            .. string.char(tonumber(ARGV[5 * place])) .. new, 'PX', ARGV[5 * place - 1])
        replies[place] = time
    else
        redis.call('SET', KEYS[place], front('d', fence, time, attempts, started - counted)
            .. received(value) .. noted(why) .. new)
    end
end

-- Some of the messages, whose commands are applied before any of them is written.
local function complete(places)
    local failed = nil
    for _, place in ipairs(places) do
        local commands = ARGV[5 * place + 2]
        if not failed and commands ~= '' then
            touch(KEYS[place], values[place]) -- PUBLISH, which writes nothing, would be heard and the rest refused
            failed = apply(commands)
        end
    end
    for _, place in ipairs(places) do
        if not failed then
            write(place, 'p')
        else
            replies[place] = failed
            if failed[1] > 0 then
                write(place, 'd', failed[1] .. ' ' .. failed[2])
            end
        end
    end
end

local todo = {}
for place = 1, number do
    if not replies[place] then
        if together and lost then
            replies[place] = -1
        elseif together then
            todo[#todo + 1] = place
        else
            complete({ place })
        end
    end
end
complete(todo)
return replies
