"""The rules of `gateway/limit_window.py` in Lua: one atomic call per admission, for all gateways that share a Redis.

Keys: KEYS[1] holds the window's batches as a MessagePack list of {first_ms, last_ms, requests, tokens}; KEYS[2] is a
sorted set of running sequences, scored by when their lease lapses if the gateway that holds it dies.
Times are the callers' Unix clocks in milliseconds: gateways need clocks that agree to well under a second.
"""

from __future__ import annotations

from gateway.redis_client import Script

_READ_WINDOW = """
local now, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local packed = redis.call('GET', KEYS[1])
local batches, requests, tokens = {}, 0, 0
for _, batch in ipairs(packed and cmsgpack.unpack(packed) or {}) do
  if batch[2] + window > now then
    batches[#batches + 1] = batch
    requests = requests + batch[3]
    tokens = tokens + batch[4]
  end
end
local function write()
  redis.call('SET', KEYS[1], cmsgpack.pack(batches), 'PX', window + 1000)
end
"""

# ARGV: now, window, batch length, limits of requests, tokens and concurrency (0: none), tokens, lease TTL, members...
# Returns: the limit exceeded or '', retry after, requests, tokens, reset, first_ms of the batch. Times in milliseconds.
ADMIT = Script(
    _READ_WINDOW
    + """
local length, max_requests, max_tokens = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local max_running, wanted, ttl = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

local function wait(field, excess)
  for _, batch in ipairs(batches) do
    excess = excess - batch[field]
    if excess <= 0 then return batch[2] + window - now end
  end
  return window
end

local exceeded, retry = '', 0
if max_requests > 0 and requests + 1 > max_requests then
  exceeded, retry = 'requests', wait(3, requests + 1 - max_requests)
end
if max_tokens > 0 and tokens + wanted > max_tokens then
  local longer = wait(4, tokens + wanted - max_tokens)
  if longer > retry then exceeded, retry = 'tokens', longer end
end
if exceeded == '' and max_running > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) + #ARGV - 8 > max_running then exceeded = 'concurrency' end
end

local first = 0
if exceeded == '' then
  local batch = batches[#batches]
  if not batch or now - batch[1] >= length then
    batch = {now, now, 0, 0}
    batches[#batches + 1] = batch
  end
  first = batch[1]
  batch[2] = math.max(batch[2], now)
  batch[3], batch[4] = batch[3] + 1, batch[4] + wanted
  requests, tokens = requests + 1, tokens + wanted
  write()
  if max_running > 0 then
    for i = 9, #ARGV do redis.call('ZADD', KEYS[2], now + ttl, ARGV[i]) end
    redis.call('PEXPIRE', KEYS[2], ttl)
  end
end
local last = batches[#batches]
return {exceeded, retry, requests, tokens, last and last[2] + window - now or 0, first}
"""
)

# ARGV: now, window, first_ms of the batch, tokens to add (negative: give back), members to release...
RELEASE = Script(
    _READ_WINDOW
    + """
local first, change = tonumber(ARGV[3]), tonumber(ARGV[4])
if change ~= 0 then
  for _, batch in ipairs(batches) do
    if batch[1] == first then
      batch[4] = batch[4] + change
      write()
    end
  end
end
for i = 5, #ARGV do redis.call('ZREM', KEYS[2], ARGV[i]) end
return 1
"""
)

# KEYS[1] is the sorted set here. ARGV: now, lease TTL, members still running...
RENEW = Script(
    """
local now, ttl = tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ttl, ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ttl)
return 1
"""
)
