-- A replica's agent, or a router, says what it observes. The heartbeat is the server's time, so that all ages are on one clock.
-- KEYS: replica or router record, replicas or routers index
-- ARGV: name, time to live in seconds, fields and values ...
-- Reply: the server's time in milliseconds
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'heartbeat_ms', now, unpack(ARGV, 3))
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[2] * 1000)
return now
