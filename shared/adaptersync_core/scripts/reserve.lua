-- The next sequence number of a run. Numbers are never given twice; one reserved and not used is a gap.
-- KEYS: run
-- ARGV: epoch, publication nonce, the latest number this trainer had: a Redis that lost it does not give it again,
--   nonce of the trainer's incarnation: two that began where an epoch was lost do not share it. Empty:
--   not compared
-- Reply: {'ok', seq}, {'fenced', present epoch}, or {'ended', an operator's reason}. The same nonce gets the same number
--   again.
local known = redis.call('HMGET', KEYS[1], 'epoch', 'seq', 'reserved_by', 'nonce', 'ended_by')
if known[1] ~= ARGV[1] or known[4] and ARGV[4] ~= '' and known[4] ~= ARGV[4] then
  return {'fenced', tonumber(known[1] or '0')}
end
if known[5] then
  return {'ended', known[5]}
end
if known[3] == ARGV[2] then
  return {'ok', tonumber(known[2])}
end
local seq = math.max(tonumber(known[2] or '0'), tonumber(ARGV[3])) + 1
redis.call('HSET', KEYS[1], 'seq', seq, 'reserved_by', ARGV[2])
return {'ok', seq}
