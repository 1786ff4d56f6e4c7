-- An operator asks for something: the coordinator, which answers with an event, or whoever keeps a host's services.
-- KEYS: requests or scale
-- ARGV: request id or host, what is asked for (JSON), how many there may be
-- Reply: {'ok'} or {'full'}
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then
  return {'full'}
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return {'ok'}
