-- Read several hashes at once: a client that asks for each by itself spends more on asking than on what it reads.
-- KEYS: hashes ...
-- Reply: for each its fields and values; empty for one that does not exist
local found = {}
for place, key in ipairs(KEYS) do
  found[place] = redis.call('HGETALL', key)
end
return found
