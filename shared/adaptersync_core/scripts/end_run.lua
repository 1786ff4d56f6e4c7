-- A trainer says that its run has ended: nothing more is published, until another trainer begins it again.
-- KEYS: run, events
-- ARGV: run name, epoch
-- Reply: 1 when it is news, 0 when it was said before, or by a trainer that was replaced
local known = redis.call('HMGET', KEYS[1], 'epoch', 'ended_at')
if known[1] ~= ARGV[2] or known[2] then
  return 0
end
redis.call('XADD', KEYS[2], '*', 'type', 'run.ended', 'run', ARGV[1], 'epoch', ARGV[2])
redis.call('HSET', KEYS[1], 'ended_at', redis.call('TIME')[1])
return 1
