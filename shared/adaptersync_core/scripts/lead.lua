-- Take or renew the coordinators' lease. Each term has an id of its own, the incarnation of all that is decided in it,
-- and a higher token: together they fence every term before, also where Redis was set back and counts anew.
-- KEYS: control, events
-- ARGV: coordinator name, lease in milliseconds, id of the term, id of the term it led in before, or nothing. When both
--   are one, the lease is renewed, which only the present term can
-- Reply: {token, generation, incarnation} for the leader, {0, name of the leader} for the others
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'leader', 'lease_until_ms', 'token', 'generation', 'incarnation')
local token = tonumber(known[3] or '0')
local mine = known[1] == ARGV[1] and (known[5] == ARGV[3] or known[5] == ARGV[4])
local held = known[1] and now < tonumber(known[2])
-- a term is never taken up again: others may have led since, also in a state of Redis that was lost
local over = ARGV[3] == ARGV[4] and known[5] ~= ARGV[3] or not held and known[5] == ARGV[3]
if held and not mine or over then
  return {0, known[1] or ''}
end
if known[1] ~= ARGV[1] or known[5] ~= ARGV[3] then
  token = token + 1
  redis.call('XADD', KEYS[2], '*', 'type', 'coordinator.elected', 'coordinator', ARGV[1], 'token', token,
    'incarnation', ARGV[3])
end
redis.call('HSET', KEYS[1], 'leader', ARGV[1], 'lease_until_ms', now + ARGV[2], 'token', token,
  'generation', known[4] or 0, 'incarnation', ARGV[3])
return {token, tonumber(known[4] or '0'), ARGV[3]}
