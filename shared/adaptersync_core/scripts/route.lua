-- Choose a replica for one request, count it in flight there, and note that its prompt will be cached there.
-- The choice is that of adaptersync/router/policy.py; its cost is bounded by blocks of one request + candidates.
-- KEYS: owned blocks of the version, in-flight counts
-- ARGV: router, spill, turn, blocks kept for one version, their time to live and that of the counts in seconds,
--       how many candidates, candidates ..., block hashes ...
-- Reply: {replica, 'affinity' | 'cold' | 'spill', owned blocks beyond the boilerplate}
-- A block is held as "child:owner,owner": the head of the one block seen after it ('' none, '*' several), and who owns it.
local CHUNK = 64 -- blocks in one read or write: the chain ends somewhere, and Lua's stack is finite
local HEAD = 4
local OWNERS = 16 -- owners remembered of one block; the oldest gives way

local router, spill, turn, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local count = tonumber(ARGV[7])
local offset = 7 + count -- the block at place k is ARGV[offset + k]
local blocks = math.min(#ARGV - offset, limit)

-- what is known of the prompt, up to the first block that nobody has seen
local child, owners, known = {}, {}, 0
for first = 1, blocks, CHUNK do
  local last = math.min(first + CHUNK - 1, blocks)
  local values = redis.call('HMGET', KEYS[1], unpack(ARGV, offset + first, offset + last))
  for i = 1, last - first + 1 do
    if not values[i] then
      break
    end
    known = known + 1
    child[known], owners[known] = string.match(values[i], '^([^:]*):(.*)$')
  end
  if known < last then
    break
  end
end

local common = 0
for k = 1, math.min(known, blocks - 1) do
  if child[k] ~= '' and child[k] ~= string.sub(ARGV[offset + k + 1], 1, HEAD) then
    common = k
  end
end

-- how far each replica owns the prompt without a gap; equal owners in a row, the usual case, are read once
local depth, alive, same = {}, nil, nil
for k = common + 1, known do
  if owners[k] ~= same then
    same = owners[k]
    local still = {}
    for name in string.gmatch(same, '[^,]+') do
      if not alive or alive[name] then
        still[name] = true
      end
    end
    alive = still
  end
  if not next(alive) then
    break
  end
  for name in pairs(alive) do
    depth[name] = k - common
  end
end

local counts = redis.call('HMGET', KEYS[2], unpack(ARGV, 8, offset))
local least, best, owned = nil, nil, false
for i = 0, count - 1 do
  local place = (turn + i) % count + 1
  local inflight = tonumber(counts[place] or 0)
  if not least or inflight < least.inflight then
    least = {place = place, inflight = inflight}
  end
end
for i = 0, count - 1 do
  local place = (turn + i) % count + 1
  local mine, inflight = depth[ARGV[7 + place]] or 0, tonumber(counts[place] or 0)
  if mine > 0 then
    owned = true
    if inflight - least.inflight <= spill
      and (not best or mine > best.depth or (mine == best.depth and inflight < best.inflight)) then
      best = {place = place, depth = mine, inflight = inflight}
    end
  end
end
local outcome = best and 'affinity' or (owned and 'spill' or 'cold')
local chosen = ARGV[7 + (best or least).place]

redis.call('HINCRBY', KEYS[2], chosen, 1)
redis.call('HINCRBY', KEYS[2], router .. '|' .. chosen, 1)
redis.call('EXPIRE', KEYS[2], ARGV[6])

local function joined(holders)
  if string.find(',' .. holders .. ',', ',' .. chosen .. ',', 1, true) then
    return holders
  end
  local _, commas = string.gsub(holders, ',', '')
  if commas + 1 >= OWNERS then
    holders = string.match(holders, ',(.*)$')
  end
  return holders == '' and chosen or holders .. ',' .. chosen
end

local changes, before, after = {}, nil, nil
for k = 1, blocks do
  local following = k < blocks and string.sub(ARGV[offset + k + 1], 1, HEAD) or ''
  local heir, holders = child[k] or '', owners[k] or ''
  if heir == '' then
    heir = following
  elseif following ~= '' and heir ~= following then
    heir = '*'
  end
  if k > common then
    if holders ~= before then
      before, after = holders, joined(holders)
    end
    holders = after
  end
  if k > known or heir ~= child[k] or holders ~= owners[k] then
    changes[#changes + 1] = ARGV[offset + k]
    changes[#changes + 1] = heir .. ':' .. holders
  end
end
if #changes > 0 then
  -- blocks after a gap may be known already, so this makes room for at least what comes
  local excess = redis.call('HLEN', KEYS[1]) + math.max(blocks - known, 0) - limit
  if excess > 0 then
    redis.call('HDEL', KEYS[1], unpack(redis.call('HRANDFIELD', KEYS[1], math.min(excess, 4000))))
  end
  for first = 1, #changes, 2 * CHUNK do
    redis.call('HSET', KEYS[1], unpack(changes, first, math.min(first + 2 * CHUNK - 1, #changes)))
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[5])
return {chosen, outcome, depth[chosen] or 0}
