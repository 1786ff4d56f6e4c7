-- The next sequence number of a run. Numbers are never given twice; one reserved and not used is a gap.
-- KEYS: run
-- ARGV: epoch, publication nonce
-- Reply: {'ok', seq} or {'fenced', present epoch}. The same nonce gets the same number again.
local known = redis.call('HMGET', KEYS[1], 'epoch', 'seq', 'reserved_by')
if known[1] ~= ARGV[1] then
  return {'fenced', tonumber(known[1] or '0')}
end
if known[3] == ARGV[2] then
  return {'ok', tonumber(known[2])}
end
local seq = redis.call('HINCRBY', KEYS[1], 'seq', 1)
redis.call('HSET', KEYS[1], 'reserved_by', ARGV[2])
return {'ok', seq}
