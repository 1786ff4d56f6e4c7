-- A router renews its lease and says what it really has in flight; counts of routers without a lease are given back.
-- All totals are made anew, so whatever was lost or counted twice is right again afterwards.
-- KEYS: in-flight counts
-- ARGV: router, lease in milliseconds (0 to leave), time to live in seconds, then replica and its count ...
-- Reply: how many routers hold a lease
-- Fields: "replica" the total, "router|replica" a router's share, "router|" its lease (server time, milliseconds)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local shares, leases = {}, {}
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  local router, replica = string.match(flat[i], '^(.*)|(.*)$')
  if router and router ~= ARGV[1] then
    if replica == '' then
      leases[router] = tonumber(flat[i + 1])
    else
      shares[#shares + 1] = {router, replica, tonumber(flat[i + 1])}
    end
  end
end
if tonumber(ARGV[2]) > 0 then
  leases[ARGV[1]] = now + ARGV[2]
  -- a full server refuses a script at its first write, if that needs memory: a router that stays hears of it here, and
  -- one that leaves takes everything along all the same
  redis.call('HSET', KEYS[1], ARGV[1] .. '|', 0)
  for i = 4, #ARGV, 2 do
    shares[#shares + 1] = {ARGV[1], ARGV[i], tonumber(ARGV[i + 1])}
  end
end
redis.call('DEL', KEYS[1])
local totals, alive = {}, 0
for router, till in pairs(leases) do
  if till > now then
    alive = alive + 1
    redis.call('HSET', KEYS[1], router .. '|', string.format('%.0f', till))
  end
end
for _, share in ipairs(shares) do
  local router, replica, count = unpack(share)
  if count > 0 and leases[router] and leases[router] > now then
    redis.call('HSET', KEYS[1], router .. '|' .. replica, count)
    totals[replica] = (totals[replica] or 0) + count
  end
end
for replica, total in pairs(totals) do
  redis.call('HSET', KEYS[1], replica, total)
end
if alive > 0 then
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return alive
