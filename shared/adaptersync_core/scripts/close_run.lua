-- An operator ends a run whose trainer does not: it publishes nothing more, until a trainer begins the run again.
-- KEYS: run, events
-- ARGV: run name, reason, how many milliseconds a trainer counts as alive after it was heard of; 0: it does not matter
-- Reply: {'ok'}, {'again'} when it had ended, {'unknown'}, or {'alive', milliseconds since its trainer was heard of}
local known = redis.call('HMGET', KEYS[1], 'epoch', 'ended_at', 'heartbeat_ms')
if not known[1] then
  return {'unknown'}
end
if known[2] then
  return {'again'}
end
local time = redis.call('TIME')
local age = time[1] * 1000 + math.floor(time[2] / 1000) - tonumber(known[3] or '0')
local alive = tonumber(ARGV[3])
if alive > 0 and age < alive then
  return {'alive', age}
end
redis.call('XADD', KEYS[2], '*', 'type', 'run.ended', 'run', ARGV[1], 'epoch', known[1], 'reason', ARGV[2])
redis.call('HSET', KEYS[1], 'ended_at', time[1], 'ended_by', ARGV[2])
return {'ok'}
