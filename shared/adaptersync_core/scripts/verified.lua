-- The stored bytes of a version were read again. The verdict has a key of its own: who verifies must not be able to write
-- what became of a version.
-- KEYS: verdict of the version, events
-- ARGV: 'true' or 'false', reason, verdict's time to live in seconds, event fields and values ...
-- Reply: 1 when it is news, 0 when the same was noted before; the time of the last look is noted either way
local known = redis.call('HMGET', KEYS[1], 'verified_ok', 'verified_reason')
local news = known[1] ~= ARGV[1] or known[2] ~= ARGV[2]
if news then
  redis.call('XADD', KEYS[2], '*', unpack(ARGV, 4))
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'verified_ok', ARGV[1], 'verified_reason', ARGV[2],
  'verified_at', time[1] .. '.' .. string.format('%06d', time[2]))
redis.call('EXPIRE', KEYS[1], ARGV[3])
return news and 1 or 0
