-- with blocks.lua
-- A replica's engine has cached some blocks of one version, or has some no longer. Safe to repeat.
-- KEYS: owned blocks of the version
-- ARGV: replica, blocks kept for one version, seconds to live, how many blocks were cached, their hashes ...,
--       hashes of blocks that are gone ...
-- Reply: how many blocks are kept now
-- Values are those of route.lua, "child:owner,owner". What follows a block is the routers' to say and is left as it is:
-- they know prompts, the engine's next block may be one of many answers. A block that nobody owns is forgotten, unless
-- it is known as boilerplate ('*'), which no engine could tell again.
local replica, limit, stored = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])

local function without(holders)
  local kept = {}
  for name in string.gmatch(holders, '[^,]+') do
    if name ~= replica then
      kept[#kept + 1] = name
    end
  end
  return kept
end

local changes, fresh, gone = {}, 0, {}
for first = 5, #ARGV, CHUNK do
  local last = math.min(first + CHUNK - 1, #ARGV)
  local values = redis.call('HMGET', KEYS[1], unpack(ARGV, first, last))
  for i = 1, last - first + 1 do
    local place, value = first + i - 1, values[i]
    local child, holders = '', ''
    if value then
      child, holders = string.match(value, '^([^:]*):(.*)$')
    end
    local owns = string.find(',' .. holders .. ',', ',' .. replica .. ',', 1, true)
    if place < 5 + stored and not owns and (value or fresh < limit) then
      local kept = without(holders)
      if #kept >= OWNERS then
        table.remove(kept, 1)
      end
      kept[#kept + 1] = replica
      changes[#changes + 1] = ARGV[place]
      changes[#changes + 1] = child .. ':' .. table.concat(kept, ',')
      if not value then
        fresh = fresh + 1
      end
    elseif place >= 5 + stored and owns then
      local kept = without(holders)
      if #kept == 0 and child ~= '*' then
        gone[#gone + 1] = ARGV[place]
      else
        changes[#changes + 1] = ARGV[place]
        changes[#changes + 1] = child .. ':' .. table.concat(kept, ',')
      end
    end
  end
end

for first = 1, #gone, CHUNK do
  redis.call('HDEL', KEYS[1], unpack(gone, first, math.min(first + CHUNK - 1, #gone)))
end
if fresh > 0 then
  local kept = redis.call('HLEN', KEYS[1])
  local excess = math.min(kept + fresh - limit, kept, 4000)
  if excess > 0 then
    forget_blocks(excess, tonumber(string.sub(ARGV[5], 1, 7), 16) or 0)
  end
end
for first = 1, #changes, 2 * CHUNK do
  redis.call('HSET', KEYS[1], unpack(changes, first, math.min(first + 2 * CHUNK - 1, #changes)))
end
if #changes > 0 then
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return redis.call('HLEN', KEYS[1])
