-- An operator asks the coordinator for something. It is a request, not a decision: the coordinator answers with an event.
-- KEYS: requests
-- ARGV: request id, request (JSON), how many may be open
-- Reply: {'ok'} or {'full'}
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then
  return {'full'}
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return {'ok'}
