-- Choose a replica for one request, count it in flight there, and note that its prompt will be cached there.
-- The choice is that of adaptersync/router/policy.py, what is promised that of promises.py beside it; the cost is
-- bounded by blocks of one request + candidates.
-- KEYS: owned blocks of the version, in-flight counts, promises of the version, repeats of its run
-- ARGV: router, policy, spill, turn, blocks kept for one version, seconds to live of each key, how many candidates,
--       candidates ..., block hashes ...
-- Reply: {replica, 'affinity' | 'cold' | 'spill', owned blocks beyond the boilerplate}
-- A block is held as "child:owner,owner": the head of the one block seen after it ('' none, '*' several), and who owns it.
-- Promises: "replica" how many more it may expect, ":prompt" as "how many more:replica", "#place" the prompts in the
-- order in which they came, from "#first" to before "#next".
local CHUNK = 64 -- blocks in one read or write: the chain ends somewhere, and Lua's stack is finite
local HEAD = 4
local OWNERS = 16 -- owners remembered of one block; the oldest gives way
local EVEN = 8 -- these five are explained in policy.py and promises.py
local FEWEST, MOST_PROMPTS = 64, 4096
local MOST = 255
local FORGET = 64
local DROPS = 4

local router, promising, spill, turn = ARGV[1], ARGV[2] == 'promise', tonumber(ARGV[3]), tonumber(ARGV[4])
local limit = tonumber(ARGV[5])
local count = tonumber(ARGV[10])
local offset = 10 + count -- the block at place k is ARGV[offset + k], the candidate ARGV[10 + k]
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

local counts, total, least = redis.call('HMGET', KEYS[2], unpack(ARGV, 11, offset)), 0, nil
for place = 1, count do
  counts[place] = tonumber(counts[place] or 0)
  total = total + counts[place]
  least = math.min(least or counts[place], counts[place])
end
local most = promising and total + math.max(spill * count, math.floor(total / EVEN)) or (least + spill) * count

local best, owned = nil, false
for i = 0, count - 1 do
  local place = (turn + i) % count + 1
  local mine = depth[ARGV[10 + place]] or 0
  owned = owned or mine > 0
  if mine > 0 and counts[place] * count <= most
    and (not best or mine > best.depth or (mine == best.depth and counts[place] < best.load)) then
    best = {place = place, depth = mine, load = counts[place]}
  end
end
local outcome = best and 'affinity' or (owned and 'spill' or 'cold')
if promising and total == 0 then
  redis.call('UNLINK', KEYS[3])
end
if not best then
  local promised = promising and redis.call('HMGET', KEYS[3], unpack(ARGV, 11, offset)) or {}
  for i = 0, count - 1 do
    local place = (turn + i) % count + 1
    local load = counts[place] + tonumber(promised[place] or 0)
    if counts[place] * count <= most and (not best or load < best.load) then
      best = {place = place, load = load}
    end
  end
end
local chosen = ARGV[10 + best.place]

redis.call('HINCRBY', KEYS[2], chosen, 1)
redis.call('HINCRBY', KEYS[2], router .. '|' .. chosen, 1)
redis.call('EXPIRE', KEYS[2], ARGV[7])

local function expect(replica, more)
  if more ~= 0 then
    redis.call('HINCRBY', KEYS[3], replica, more)
  end
end

local function promise(prompt)
  local held = redis.call('HGET', KEYS[3], ':' .. prompt)
  if held then
    redis.call('HINCRBY', KEYS[4], 'asked', 1)
    local left, home = string.match(held, '^(%d+):(.*)$')
    left = tonumber(left)
    local kept = math.max(left - 1, 0)
    if home == chosen then
      expect(chosen, kept - left)
    else
      expect(home, -left)
      expect(chosen, kept)
    end
    if kept ~= left or home ~= chosen then
      redis.call('HSET', KEYS[3], ':' .. prompt, kept .. ':' .. chosen)
    end
    return
  end
  if outcome ~= 'cold' then
    return
  end
  local ends = redis.call('HMGET', KEYS[3], '#first', '#next')
  local first, following = tonumber(ends[1] or 0), tonumber(ends[2] or 0)
  local keep = math.min(math.max(total, FEWEST), MOST_PROMPTS)
  for _ = 1, math.min(following - first + 1 - keep, DROPS) do
    local oldest = ':' .. redis.call('HGET', KEYS[3], '#' .. first)
    local left, home = string.match(redis.call('HGET', KEYS[3], oldest), '^(%d+):(.*)$')
    expect(home, -left)
    redis.call('HDEL', KEYS[3], oldest, '#' .. first)
    first = first + 1
  end
  local requests = redis.call('HINCRBY', KEYS[4], 'asked', 1)
  local prompts = redis.call('HINCRBY', KEYS[4], 'prompts', 1)
  local more = math.min(math.floor((2 * requests + prompts) / (2 * prompts)) - 1, MOST)
  if prompts >= FORGET then
    redis.call('HSET', KEYS[4], 'asked', math.floor(requests / 2), 'prompts', math.floor(prompts / 2))
  end
  expect(chosen, more)
  redis.call('HSET', KEYS[3], ':' .. prompt, more .. ':' .. chosen, '#' .. following, prompt, '#first', first,
    '#next', following + 1)
  redis.call('EXPIRE', KEYS[3], ARGV[8])
  redis.call('EXPIRE', KEYS[4], ARGV[9])
end
if promising and blocks > 0 then
  promise(ARGV[#ARGV])
end

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
redis.call('EXPIRE', KEYS[1], ARGV[6])
return {chosen, outcome, depth[chosen] or 0}
