#!lua flags=allow-oom
-- Requests of a router have ended.
-- KEYS: in-flight counts
-- ARGV: router, then replica and how many ended there ...
-- Reply: how many counts were taken back. Never below zero: a count may have been given back, or lost, before.
local done = 0
for i = 2, #ARGV, 2 do
  local field = ARGV[1] .. '|' .. ARGV[i]
  local ended = math.min(tonumber(ARGV[i + 1]), tonumber(redis.call('HGET', KEYS[1], field) or 0))
  if ended > 0 then
    if redis.call('HINCRBY', KEYS[1], field, -ended) == 0 then
      redis.call('HDEL', KEYS[1], field)
    end
    if redis.call('HINCRBY', KEYS[1], ARGV[i], -ended) <= 0 then
      redis.call('HDEL', KEYS[1], ARGV[i])
    end
    done = done + ended
  end
end
return done
