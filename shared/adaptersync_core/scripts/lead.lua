-- Take or renew the coordinators' lease. Every change of leader gets a higher token, which fences the one before.
-- KEYS: control, events
-- ARGV: coordinator name, lease in milliseconds, a random id for a control state that has none
-- Reply: {token, generation, incarnation} for the leader, {0, name of the leader} for the others
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'leader', 'lease_until_ms', 'token', 'generation', 'incarnation')
local token = tonumber(known[3] or '0')
if known[1] and known[1] ~= ARGV[1] and now < tonumber(known[2]) then
  return {0, known[1]}
end
local incarnation = known[5] or ARGV[3]
if known[1] ~= ARGV[1] or not known[5] then
  token = token + 1
  redis.call('XADD', KEYS[2], '*', 'type', 'coordinator.elected', 'coordinator', ARGV[1], 'token', token,
    'incarnation', incarnation)
end
redis.call('HSET', KEYS[1], 'leader', ARGV[1], 'lease_until_ms', now + ARGV[2], 'token', token,
  'generation', known[4] or 0, 'incarnation', incarnation)
return {token, tonumber(known[4] or '0'), incarnation}
