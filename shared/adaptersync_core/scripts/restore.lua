-- Put back what the coordinator's journal and the store know, into a control state that was lost or is older than that.
-- KEYS: control, table, events, runs, then the keys that the state names by their place
-- ARGV: fence, new incarnation, generation, table (JSON), state (JSON)
--   state.runs     [[key, name, epoch, seq, max_staleness], ...]   numbers only ever rise
--   state.records  [[key, seconds to live, [field, value, ...]], ...]
-- Reply: {'ok'} or {'fenced'}
local known = redis.call('HMGET', KEYS[1], 'incarnation', 'token')
if not known[1] or known[1] .. ':' .. known[2] ~= ARGV[1] then
  return {'fenced'}
end
local state = cjson.decode(ARGV[5])
for _, run in ipairs(state.runs) do
  local present = redis.call('HMGET', KEYS[run[1]], 'epoch', 'seq')
  if tonumber(present[1] or '0') < run[3] then
    redis.call('HSET', KEYS[run[1]], 'epoch', run[3], 'max_staleness', run[5])
    redis.call('HDEL', KEYS[run[1]], 'nonce', 'reserved_by')
  end
  redis.call('HSET', KEYS[run[1]], 'seq', math.max(tonumber(present[2] or '0'), run[4]))
  redis.call('SADD', KEYS[4], run[2])
end
for _, record in ipairs(state.records) do
  redis.call('HSET', KEYS[record[1]], unpack(record[3]))
  redis.call('EXPIRE', KEYS[record[1]], record[2])
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'generation', ARGV[3])
redis.call('SET', KEYS[2], ARGV[4])
redis.call('XADD', KEYS[3], '*', 'type', 'control.restored', 'incarnation', ARGV[2], 'generation', ARGV[3])
return {'ok'}
