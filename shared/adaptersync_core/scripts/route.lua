#!lua
-- with blocks.lua
-- Choose a replica for one request, count it in flight there, and note that its prompt will be cached there.
-- The choice is that of adaptersync/router/policy.py, what is promised that of promises.py beside it, and how long
-- prefills will take that of queues.py; the cost is bounded by blocks of one request + candidates.
-- KEYS: owned blocks of the version, in-flight counts, promises of the version, repeats of its run, queues
-- ARGV: router, policy, spill, turn, blocks kept for one version, seconds to live of each key, sequences of the request,
--       how many of them are of the prompt that is looked up, the candidate that its session has or '', '1' to have the
--       decision explained or '', tokens in a block (0: no queue is looked at or joined), '1' if the candidates
--       are all that are ready or '', how many they are, candidates ..., block hashes ...
-- Reply: {replica, 'affinity' | 'cold' | 'spill' | 'session', owned blocks beyond the boilerplate, blocks of that, blocks
--       that were known, and if it is to be explained of each candidate: owned blocks, in flight, promised,
--       microseconds until its prefill begins, and that it takes}
-- A block is held as "child:owner,owner": the head of the one block seen after it ('' none, '*' several), and who owns it.
-- Promises: "replica" how many more sequences it may expect, ":prompt" as "how many more:replica", "#place" the prompts
-- in the order in which they came, from "#first" to before "#next", "#again" how many came again since the last new one.
-- Queues: "replica" the moment at which all it was sent will be prefilled, by this server's clock, "replica|" its tokens a
-- second.
local HEAD = 4
local EVEN = 8 -- these are explained in policy.py, promises.py and queues.py
local FEWEST, MOST_PROMPTS = 64, 4096
local MOST = 255
local FORGET = 64
local DROPS = 4
local STEP_US, RATE = 50000, 8000

local ARGV, match, sub, floor = ARGV, string.match, string.sub, math.floor -- as locals they are found faster
local router, promising, spill, turn = ARGV[1], ARGV[2] ~= 'threshold', tonumber(ARGV[3]), tonumber(ARGV[4])
local limit = tonumber(ARGV[5])
local weight, alike, kept = tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13]
local tokens, whole, count = tonumber(ARGV[15]), ARGV[16] ~= '', tonumber(ARGV[17])
local offset = 17 + count -- the block at place k is ARGV[offset + k], the candidate ARGV[17 + k]
local blocks = math.min(#ARGV - offset, limit)

-- what is known of the prompt, up to the first block that nobody has seen, and the heads of what follows each block
local child, owners, known, heads = {}, {}, 0, {}
for first = 1, blocks, CHUNK do
  local last = math.min(first + CHUNK - 1, blocks)
  local values = redis.call('HMGET', KEYS[1], unpack(ARGV, offset + first, offset + last))
  for i = 1, last - first + 1 do
    if not values[i] then
      break
    end
    known = known + 1
    child[known], owners[known] = match(values[i], '^([^:]*):(.*)$')
  end
  if known < last then
    break
  end
end

local common = 0
for k = 1, blocks - 1 do
  heads[k] = sub(ARGV[offset + k + 1], 1, HEAD)
  if k <= known and child[k] ~= '' and child[k] ~= heads[k] then
    common = k
  end
end

-- how far each replica owns the prompt without a gap; equal owners in a row, the usual case, are read once
local depth, alive, same = {}, {}, nil
for k = common + 1, known + 1 do
  if owners[k] ~= same then -- there are none behind the last that is known
    local still = {}
    for name in string.gmatch(owners[k] or '', '[^,]+') do
      still[name] = not same or alive[name]
    end
    for name in pairs(alive) do
      depth[name] = k - 1 - common
    end
    alive, same = still, owners[k]
  end
end

local counts, total, least = redis.call('HMGET', KEYS[2], unpack(ARGV, 18, offset)), 0, nil
for place = 1, count do
  local inflight = tonumber(counts[place] or 0)
  counts[place], total = inflight, total + inflight
  if not least or inflight < least then
    least = inflight
  end
end
local most = promising and total + math.max(spill * count, floor(total / EVEN)) or (least + spill) * count

-- when each would answer, and no later than when is soon
local waits, takes, expected, now, soon = {}, {}, {}, 0, nil
if tokens > 0 then
  local fields, deepest, us = {}, 0, tokens * 1000000
  for place = 1, count do
    local replica = ARGV[17 + place]
    local mine = depth[replica]
    fields[place], fields[count + place] = replica, replica .. '|'
    if mine and mine > deepest then
      deepest = mine
    end
  end
  local queues, time = redis.call('HMGET', KEYS[5], unpack(fields)), redis.call('TIME')
  now = time[1] * 1000000 + time[2]
  for place = 1, count do
    local mine, rate = depth[fields[place]] or 0, queues[count + place] or RATE
    local wait = queues[place] and queues[place] - now or 0
    local take, again = (blocks - common - mine) * us / rate, (deepest - mine) * us / rate
    wait, take = wait > 0 and wait or 0, take - take % 1
    waits[place], takes[place], expected[place] = wait, take, wait + take + again - again % 1
    if counts[place] * count <= most and expected[place] < (soon or expected[place] + 1) then
      soon = expected[place]
    end
  end
  soon = ARGV[2] == 'expected' and soon + STEP_US
end

local best, owned = nil, false
for i = 0, count - 1 do
  local place = (turn + i) % count + 1
  local mine = depth[ARGV[17 + place]] or 0
  owned = owned or mine > 0
  if mine > 0 and counts[place] * count <= most and not (soon and expected[place] > soon)
    and (not best or mine > best.depth or (mine == best.depth and counts[place] < best.load)) then
    best = {place = place, depth = mine, load = counts[place]}
  end
end
local outcome = best and 'affinity' or (owned and 'spill' or 'cold')
if kept ~= '' then
  for place = 1, count do
    if ARGV[17 + place] == kept then
      best, outcome = {place = place}, 'session'
    end
  end
end
if promising and whole and total == 0 then -- nothing is in flight anywhere, nothing is expected
  local again = redis.call('HGET', KEYS[3], '#again')
  if again then
    redis.call('HINCRBY', KEYS[4], 'asked', again)
    redis.call('EXPIRE', KEYS[4], ARGV[9])
  end
  redis.call('UNLINK', KEYS[3])
end
if not best then
  local promised = promising and redis.call('HMGET', KEYS[3], unpack(ARGV, 18, offset)) or {}
  for i = 0, count - 1 do
    local place = (turn + i) % count + 1
    local load = counts[place] + tonumber(promised[place] or 0)
    if counts[place] * count <= most and not (soon and expected[place] > soon) and (not best or load < best.load) then
      best = {place = place, load = load}
    end
  end
end
local chosen = ARGV[17 + best.place]
local reply = {chosen, outcome, depth[chosen] or 0, common, known}
if ARGV[14] ~= '' then -- before anything is changed: these are what it was decided from
  local promised = promising and redis.call('HMGET', KEYS[3], unpack(ARGV, 18, offset)) or {}
  for place = 1, count do
    reply[#reply + 1] = depth[ARGV[17 + place]] or 0
    reply[#reply + 1] = counts[place]
    reply[#reply + 1] = tonumber(promised[place] or 0)
    reply[#reply + 1] = waits[place] or 0
    reply[#reply + 1] = takes[place] or 0
  end
end

if weight > 0 then
  local running = redis.call('HINCRBY', KEYS[2], chosen, weight)
  redis.call('HINCRBY', KEYS[2], router .. '|' .. chosen, weight)
  if running == weight then -- the key may be new; the routers' beat renews it
    redis.call('EXPIRE', KEYS[2], ARGV[7])
  end
end

if tokens > 0 and takes[best.place] > 0 then
  if redis.call('HSET', KEYS[5], chosen, now + waits[best.place] + takes[best.place]) == 1 then -- the key may be new
    redis.call('EXPIRE', KEYS[5], ARGV[10], 'NX')
  end
end

-- The prompts that were new longest ago make room: returns where the oldest now is, and what `chosen` lost by it.
local function forget(first, following)
  local lost = 0
  local keep = math.min(math.max(total, FEWEST), MOST_PROMPTS)
  for _ = 1, math.min(following - first + 1 - keep, DROPS) do
    local oldest = redis.call('HGET', KEYS[3], '#' .. first)
    local left, home = match(redis.call('HGET', KEYS[3], oldest), '^(%d+):(.*)$')
    if home == chosen then
      lost = lost + left
    elseif left ~= '0' then
      redis.call('HINCRBY', KEYS[3], home, -left)
    end
    redis.call('HDEL', KEYS[3], oldest, '#' .. first)
    first = first + 1
  end
  return first, lost
end

-- Prompts of this run had so many sequences again, and now a new one has its first: how many more are expected of it?
local function learn(again)
  local seen = redis.call('HMGET', KEYS[4], 'asked', 'prompts')
  local asked, prompts = (tonumber(seen[1]) or 0) + again + alike, (tonumber(seen[2]) or 0) + 1
  local more = math.min(math.max(floor((2 * asked + prompts) / (2 * prompts)) - alike, 0), MOST)
  if prompts >= FORGET then
    asked, prompts = floor(asked / 2), floor(prompts / 2)
  end
  redis.call('HSET', KEYS[4], 'asked', asked, 'prompts', prompts)
  redis.call('EXPIRE', KEYS[4], ARGV[9])
  return more
end

local function promise(prompt)
  local held = redis.call('HMGET', KEYS[3], prompt, chosen, '#again', '#first', '#next')
  local expected, again = tonumber(held[2]) or 0, tonumber(held[3]) or 0
  if held[1] then
    local left, home = match(held[1], '^(%d+):(.*)$')
    local kept = math.max(left - alike, 0)
    if home == chosen then
      expected = expected - left + kept
    else
      expected = expected + kept
      if left ~= '0' then
        redis.call('HINCRBY', KEYS[3], home, -left)
      end
    end
    redis.call('HSET', KEYS[3], prompt, kept .. ':' .. chosen, chosen, expected, '#again', again + alike)
  elseif outcome == 'cold' then
    local following = tonumber(held[5]) or 0
    local first, lost = forget(tonumber(held[4]) or 0, following)
    local more = learn(again)
    redis.call('HSET', KEYS[3], prompt, more .. ':' .. chosen, chosen, expected - lost + more, '#again', 0,
      '#' .. following, prompt, '#first', first, '#next', following + 1)
    redis.call('EXPIRE', KEYS[3], ARGV[8])
  end
end
if promising and blocks > 0 then
  promise(':' .. ARGV[#ARGV])
end

local function joined(holders)
  if string.find(',' .. holders .. ',', ',' .. chosen .. ',', 1, true) then
    return holders
  end
  local _, commas = string.gsub(holders, ',', '')
  if commas + 1 >= OWNERS then
    holders = match(holders, ',(.*)$')
  end
  return holders == '' and chosen or holders .. ',' .. chosen
end

local changes, before, after = {}, nil, nil
for k = 1, blocks do
  local following = heads[k] or ''
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
    forget_blocks(math.min(excess, 4000), turn)
  end
  for first = 1, #changes, 2 * CHUNK do
    redis.call('HSET', KEYS[1], unpack(changes, first, math.min(first + 2 * CHUNK - 1, #changes)))
  end
  redis.call('EXPIRE', KEYS[1], ARGV[6])
end
return reply
