"""The rules of `limit_account.py` in Lua: one atomic call per admission, for all gateways that share a Redis.

KEYS[1] holds the window's batches as a MessagePack list of {first_ms, last_ms, requests, tokens}.
KEYS[2] is a hash with one field per gateway: {running, version, expires_ms, number of the last corrections, hold_ms}.

A gateway states its count of running sequences as a whole, never as a change. So a statement that is lost, late or
doubled does no harm: the next one is right again, and one with an older version is ignored. Token corrections are
changes, so they carry a number and are applied once. An account that is not stated again expires: its gateway is dead.
Times are the callers' Unix clocks in milliseconds: gateways need clocks that agree to well under a second.
"""

from __future__ import annotations

import msgspec

from gateway.cache.redis_client import Script


class Statement(msgspec.Struct, kw_only=True):
    """The argument of `STATE`: what a gateway says about one key.

    Attributes:
        running: Sequences that it runs, and those about which it is asking.
        hold_ms: How long its sequences usually run.
        number: Of the corrections; 0 where there are none.
        corrections: Pairs of a batch's first_ms and the tokens to add to it (negative: give back), flattened.
    """

    now: int
    window: int
    ttl: int
    gateway: str
    version: int
    running: int
    hold_ms: int
    number: int = 0
    corrections: list[int] = []


class Question(Statement, kw_only=True):
    """The argument of `ADMIT`: a statement without the request in question, and what the request wants. 0: no limit."""

    batch: int
    max_requests: int
    max_tokens: int
    max_running: int
    tokens: int
    sequences: int


_STATE = """
local call = cmsgpack.unpack(ARGV[1])
local now, window = call.now, call.window

local own, others, held = nil, 0, 0
local fields = redis.call('HGETALL', KEYS[2])
for i = 1, #fields, 2 do
  local account = cmsgpack.unpack(fields[i + 1])
  if fields[i] == call.gateway then
    own = account
  elseif account[3] > now then
    others = others + account[1]
    held = held + account[1] * account[5]
  elseif account[3] + window < now then
    redis.call('HDEL', KEYS[2], fields[i])
  end
end
own = own or {0, 0, 0, 0, 0}
if call.version <= own[2] then return {'stale'} end

local packed = redis.call('GET', KEYS[1])
local batches, requests, tokens = {}, 0, 0
for _, batch in ipairs(packed and cmsgpack.unpack(packed) or {}) do
  if batch[2] + window > now then batches[#batches + 1] = batch end
end
local is_new = call.number > own[4]
for _, batch in ipairs(batches) do
  for i = 1, is_new and #call.corrections or 0, 2 do
    if batch[1] == call.corrections[i] then batch[4] = batch[4] + call.corrections[i + 1] end
  end
  requests = requests + batch[3]
  tokens = tokens + batch[4]
end

local function write_window()
  redis.call('SET', KEYS[1], cmsgpack.pack(batches), 'PX', window + 1000)
end
local function write_account(running)
  local number = math.max(call.number, own[4])
  local account = {running, call.version, now + call.ttl, number, call.hold_ms}
  redis.call('HSET', KEYS[2], call.gateway, cmsgpack.pack(account))
  redis.call('PEXPIRE', KEYS[2], window + call.ttl)
end
"""

# Returns: {'done'}, or {'stale'}.
STATE = Script(
    _STATE
    + """
if is_new then write_window() end
write_account(call.running)
return {'done'}
"""
)

# Returns: the limit exceeded or '', retry after, requests, tokens, reset, first_ms of the batch, sequences running
# everywhere, and how long they usually run; or {'stale'}. Times in milliseconds.
ADMIT = Script(
    _STATE
    + """
local function wait(field, excess)
  for _, batch in ipairs(batches) do
    excess = excess - batch[field]
    if excess <= 0 then return batch[2] + window - now end
  end
  return window
end

local exceeded, retry = '', 0
if call.max_requests > 0 and requests + 1 > call.max_requests then
  exceeded, retry = 'requests', wait(3, requests + 1 - call.max_requests)
end
if call.max_tokens > 0 and tokens + call.tokens > call.max_tokens then
  local longer = wait(4, tokens + call.tokens - call.max_tokens)
  if longer > retry then exceeded, retry = 'tokens', longer end
end
local running = others + call.running
if exceeded == '' and call.max_running > 0 and running + call.sequences > call.max_running then
  exceeded = 'concurrency'
end

local first = 0
if exceeded == '' then
  local batch = batches[#batches]
  if not batch or now - batch[1] >= call.batch then
    batch = {now, now, 0, 0}
    batches[#batches + 1] = batch
  end
  first = batch[1]
  batch[2] = math.max(batch[2], now)
  batch[3], batch[4] = batch[3] + 1, batch[4] + call.tokens
  requests, tokens = requests + 1, tokens + call.tokens
  write_account(call.running + call.sequences)
else
  write_account(call.running)
end
if exceeded == '' or is_new then write_window() end
local last = batches[#batches]
local hold = running > 0 and (held + call.running * call.hold_ms) / running or 0
return {exceeded, retry, requests, tokens, last and last[2] + window - now or 0, first, running, math.floor(hold)}
"""
)
