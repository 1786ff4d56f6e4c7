-- Commit one decision of the coordinator: all of it, or nothing.
-- KEYS: control, table, events, requests, then the keys that the decision names by their place
-- ARGV: fence (incarnation:token), generation the decision was made from, decision (JSON), new table (JSON)
--   decision.acks       [[replica key, acks key, adapter id, engine epoch], ...]  each replica must be alive in this life of its
--                       engine and have accepted that version, if one is named, in it
--   decision.records    [[key, seconds to live, [field, value, ...], [field, value]], ...]  hashes to write; the last
--                       field is left as it is where it is there
--   decision.events     [[field, value, ...], ...]
--   decision.answered   [request id, ...]
--   decision.alive_ms   how old a heartbeat may be
-- Reply: {'ok', generation}, or {'fenced'}, {'moved', generation}, {'silent', key}, {'unacked', key}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'token', 'generation', 'incarnation', 'lease_until_ms')
-- a lease that ran out ends the term: a state of Redis that is older never makes a former leader's write good again
if not known[1] or known[3] .. ':' .. known[1] ~= ARGV[1] or now >= tonumber(known[4]) then
  return {'fenced'}
end
if known[2] ~= ARGV[2] then
  return {'moved', tonumber(known[2] or '0')}
end
local decision = cjson.decode(ARGV[3])
for _, need in ipairs(decision.acks) do
  local report = redis.call('HMGET', KEYS[need[1]], 'heartbeat_ms', 'engine_epoch')
  if not report[1] or now - report[1] > decision.alive_ms or report[2] ~= need[4] then
    return {'silent', KEYS[need[1]]}
  end
  local ack = need[3] ~= '' and redis.call('HGET', KEYS[need[2]], need[3])
  ack = ack and cjson.decode(ack)
  if need[3] ~= '' and (not ack or not ack.accepted or ack.engine_epoch ~= need[4]) then
    return {'unacked', KEYS[need[2]]}
  end
end
-- told before it is done: where the stream takes nothing, nothing is done
for _, event in ipairs(decision.events) do
  redis.call('XADD', KEYS[3], '*', unpack(event))
end
local generation = redis.call('HINCRBY', KEYS[1], 'generation', 1)
redis.call('SET', KEYS[2], ARGV[4])
for _, record in ipairs(decision.records) do
  redis.call('HSET', KEYS[record[1]], unpack(record[3]))
  if redis.call('HEXISTS', KEYS[record[1]], record[4][1]) == 0 then
    redis.call('HSET', KEYS[record[1]], unpack(record[4]))
  end
  redis.call('EXPIRE', KEYS[record[1]], record[2])
end
if #decision.answered > 0 then
  redis.call('HDEL', KEYS[4], unpack(decision.answered))
end
return {'ok', generation}
