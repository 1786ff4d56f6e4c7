-- Make a stored version known that Redis forgot; what it knows stays as it is.
-- KEYS: manifest, published, events
-- ARGV: seq, adapter id, manifest, manifest time to live in seconds, event fields and values ... where it is news
-- Reply: 1, or 0 when the number stands for a version already
if #redis.call('ZRANGEBYSCORE', KEYS[2], ARGV[1], ARGV[1]) > 0 and not redis.call('ZSCORE', KEYS[2], ARGV[2]) then
  return 0
end
if #ARGV > 4 and not redis.call('ZSCORE', KEYS[2], ARGV[2]) then
  redis.call('XADD', KEYS[3], '*', unpack(ARGV, 5))
end
redis.call('SET', KEYS[1], ARGV[3], 'EX', ARGV[4], 'NX')
redis.call('ZADD', KEYS[2], 'NX', ARGV[1], ARGV[2])
return 1
