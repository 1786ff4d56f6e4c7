-- A trainer begins an incarnation of a run: the next epoch, which fences every older one.
-- KEYS: run, runs, events
-- ARGV: run name, incarnation nonce, max_staleness, trainer host, highest epoch and sequence number in the store
-- Reply: {epoch, seq of the latest version}. The same nonce gets the same epoch again, and opens a run that had ended;
-- not where Redis lost what the store or a coordinator knows of: then epochs above it are somebody's.
local known = redis.call('HMGET', KEYS[1], 'nonce', 'epoch', 'seq', 'epoch_floor', 'ended_at')
local epoch, seq = tonumber(known[2] or '0'), math.max(tonumber(known[3] or '0'), tonumber(ARGV[6]))
local highest = math.max(epoch, tonumber(known[4] or '0'), tonumber(ARGV[5]))
local same = known[1] == ARGV[2] and epoch == highest
if same and not known[5] then
  return {epoch, seq}
end
epoch = same and epoch or highest + 1
redis.call('XADD', KEYS[3], '*', 'type', 'run.began', 'run', ARGV[1], 'epoch', epoch, 'seq', seq,
  'max_staleness', ARGV[3], 'trainer', ARGV[4])
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'nonce', ARGV[2], 'epoch', epoch, 'seq', seq, 'max_staleness', ARGV[3],
  'trainer', ARGV[4], 'began_at', time[1], 'heartbeat_ms', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HDEL', KEYS[1], 'ended_at', 'ended_by')
redis.call('SADD', KEYS[2], ARGV[1])
return {epoch, seq}
