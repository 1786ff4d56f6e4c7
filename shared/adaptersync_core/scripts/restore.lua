-- Put back what the coordinator's journal and the store know, into a control state that was lost or is older than that.
-- KEYS: control, table, events, runs, then the keys that the state names by their place
-- ARGV: fence, new incarnation, generation, table (JSON), state (JSON), gap
--   state.runs     [[key, name, epoch, seq, max_staleness, ended_at, ended_by], ...]   numbers only ever rise
--   state.records  [[key, seconds to live, [field, value, ...], [field, value]], ...]  as decide.lua has them
--   gap            how many numbers are left out: some were given out and written down nowhere
-- Reply: {'ok'} or {'fenced'}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'incarnation', 'token', 'lease_until_ms')
if not known[1] or known[1] .. ':' .. known[2] ~= ARGV[1] or now >= tonumber(known[3]) then
  return {'fenced'}
end
redis.call('XADD', KEYS[3], '*', 'type', 'control.restored', 'incarnation', ARGV[2], 'generation', ARGV[3])
local state = cjson.decode(ARGV[5])
for _, run in ipairs(state.runs) do
  local present = redis.call('HMGET', KEYS[run[1]], 'epoch', 'seq', 'ended_at')
  local epoch = math.max(tonumber(present[1] or '0'), run[3])
  if not present[1] or tonumber(present[1]) < run[3] then
    redis.call('HSET', KEYS[run[1]], 'epoch', run[3], 'max_staleness', run[5])
    redis.call('HDEL', KEYS[run[1]], 'nonce')
  end
  if run[6] > 0 and epoch == run[3] and not present[3] then
    redis.call('HSET', KEYS[run[1]], 'ended_at', run[6])
    if run[7] ~= '' then
      redis.call('HSET', KEYS[run[1]], 'ended_by', run[7])
    end
  end
  -- the next trainer begins beyond what was given out; one whose epoch is known goes on in it
  redis.call('HSET', KEYS[run[1]], 'epoch_floor', epoch + ARGV[6],
    'seq', math.max(tonumber(present[2] or '0'), run[4]) + ARGV[6])
  redis.call('HDEL', KEYS[run[1]], 'reserved_by')
  redis.call('SADD', KEYS[4], run[2])
end
for _, record in ipairs(state.records) do
  redis.call('HSET', KEYS[record[1]], unpack(record[3]))
  if redis.call('HEXISTS', KEYS[record[1]], record[4][1]) == 0 then
    redis.call('HSET', KEYS[record[1]], unpack(record[4]))
  end
  redis.call('EXPIRE', KEYS[record[1]], record[2])
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'generation', ARGV[3])
redis.call('SET', KEYS[2], ARGV[4])
return {'ok'}
