-- Part of the blocks of one version that a replica is said to own, as far as its engine could have told of them.
-- KEYS: owned blocks of the version
-- ARGV: replica, cursor ('0' to begin), about how many blocks to look at
-- Reply: {cursor of the next part ('0' at the end), how many blocks are kept, hashes that the replica owns ...}
-- Hashes of bytes (blocks.py) are left out: no engine knows them. They are marked, so they are no pure hex.
local HASH = 16 -- hex digits
local page = redis.call('HSCAN', KEYS[1], ARGV[2], 'COUNT', ARGV[3])
local reply, mine = {page[1], redis.call('HLEN', KEYS[1])}, ',' .. ARGV[1] .. ','
for i = 1, #page[2], 2 do
  local owners = string.match(page[2][i + 1], ':(.*)$')
  if #page[2][i] == HASH and not string.find(page[2][i], '%X') and string.find(',' .. owners .. ',', mine, 1, true) then
    reply[#reply + 1] = page[2][i]
  end
end
return reply
