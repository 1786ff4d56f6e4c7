-- A replica accepts or refuses a version.
-- KEYS: acks of the replica, events
-- ARGV: adapter id, ack, time to live in seconds, event fields and values ...
-- Reply: 1 when it is news, 0 when the same was said before
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
  redis.call('EXPIRE', KEYS[1], ARGV[3])
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 4))
return 1
