-- A replica accepts or refuses a version.
-- KEYS: acks of the replica, replicas index, events
-- ARGV: replica, adapter id, ack, time to live in seconds, event fields and values ...
-- Reply: 1 when it is news, 0 when the same was said before
if redis.call('HGET', KEYS[1], ARGV[2]) == ARGV[3] then
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  return 0
end
redis.call('XADD', KEYS[3], '*', unpack(ARGV, 5))
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[4])
-- the index says when each replica last said anything, so that a look reads only those who did
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], 'XX', time[1] * 1000 + math.floor(time[2] / 1000), ARGV[1])
return 1
