-- A trainer says that it lives: an operator does not end its run by mistake.
-- KEYS: run
-- ARGV: epoch, nonce of the trainer
-- Reply: 1, or 0 when another trainer has begun. A rebuilt run knows no nonce: whose epoch it is goes on in it.
local known = redis.call('HMGET', KEYS[1], 'epoch', 'nonce')
if known[1] ~= ARGV[1] or known[2] and known[2] ~= ARGV[2] then
  return 0
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'heartbeat_ms', time[1] * 1000 + math.floor(time[2] / 1000))
return 1
