-- Announce a version whose files are in the store.
-- KEYS: run, manifest, published, events
-- ARGV: epoch, seq, adapter id, manifest, manifest time to live in seconds, nonce of the trainer, event fields and values ...
-- Reply: {'ok'}, {'again'} when it was announced before, {'fenced', present epoch}, {'ended', an operator's reason}, or
-- {'taken'} when the name or the number stands for other bytes.
local known = redis.call('GET', KEYS[2])
if known then
  return {known == ARGV[4] and 'again' or 'taken'}
end
local run = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'ended_by')
local epoch = run[1]
if epoch ~= ARGV[1] or run[2] and ARGV[6] ~= '' and run[2] ~= ARGV[6] then
  return {'fenced', tonumber(epoch or '0')}
end
if run[3] then
  return {'ended', run[3]}
end
if #redis.call('ZRANGEBYSCORE', KEYS[3], ARGV[2], ARGV[2]) > 0 then
  return {'taken'} -- a number given out before Redis was lost and once more after it
end
redis.call('XADD', KEYS[4], '*', unpack(ARGV, 7))
redis.call('SET', KEYS[2], ARGV[4], 'EX', ARGV[5])
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[3])
return {'ok'}
