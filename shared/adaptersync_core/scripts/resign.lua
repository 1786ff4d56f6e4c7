-- A leader that stops in order lets another lead at once.
-- KEYS: control
-- ARGV: fence (incarnation:token)
-- Reply: 1, or 0 when another leads
local known = redis.call('HMGET', KEYS[1], 'token', 'incarnation')
if not known[1] or known[2] .. ':' .. known[1] ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'lease_until_ms', 0)
return 1
