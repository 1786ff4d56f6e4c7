-- What the scripts share that keep a version's table of owned blocks; KEYS[1] is that table.
local CHUNK = 64 -- blocks in one read or write: the chain ends somewhere, and Lua's stack is finite
local OWNERS = 16 -- owners remembered of one block; the oldest gives way

-- Forget so many blocks, those in a row from some place of the hash: to draw each by lot takes ten times as long.
local function forget_blocks(excess, place)
  for _ = 1, 8 do -- a row may end with the hash, and goes on at its beginning
    local found = redis.call('HSCAN', KEYS[1], place, 'COUNT', excess)
    local last = math.min(#found[2], 2 * excess) -- names and values take turns
    for first = 1, last, 2 * CHUNK do
      local gone = {}
      for i = first, math.min(first + 2 * CHUNK - 1, last), 2 do
        gone[#gone + 1] = found[2][i]
      end
      excess = excess - redis.call('HDEL', KEYS[1], unpack(gone))
    end
    place = found[1]
    if excess <= 0 then
      return
    end
  end
end

