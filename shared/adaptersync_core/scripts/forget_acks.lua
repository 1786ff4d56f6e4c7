-- A replica takes back what it said of versions it no longer holds.
-- KEYS: acks of the replica, replicas index
-- ARGV: replica, adapter ids ...
-- Reply: how many there were
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], 'XX', time[1] * 1000 + math.floor(time[2] / 1000), ARGV[1])
return redis.call('HDEL', KEYS[1], unpack(ARGV, 2))
