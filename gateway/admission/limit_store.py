"""The limits of a key in Redis, where all gateways meet: asks for admission, and states the running sequences.

A gateway that dies is forgotten after `LEASE_TTL_S`. What Redis does not answer is marked in the account, so that it is
stated again: an admission that Redis made without our knowing is put right by the next statement.

The scripts are the rules of `limit_account.py` in Lua: one atomic call per admission, for all gateways that share a
Redis. KEYS[1] holds the window's batches as a MessagePack list of {first_ms, last_ms, requests, tokens}. KEYS[2] is a
hash with one field per gateway: {running, version, expires_ms, number of the last corrections, hold_ms}.

A gateway states its count of running sequences as a whole, never as a change, so a statement that is lost, late or
doubled does no harm: the next one is right again, and one with an older version is ignored. Corrections of tokens are
changes, so they carry a number and are applied once. Times are the callers' Unix clocks in milliseconds: gateways need
clocks that agree to well under a second.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from gateway.admission.limit_account import BATCH_S, WINDOW_S, KeyAccount, LimitName, Limits, Verdict
from gateway.cache.redis_client import RedisCache, Script


class Statement(msgspec.Struct, kw_only=True):
    """The argument of `STATE`: a gateway's statement about one key.

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
    """The argument of `ADMIT`: a statement without the request, and the request's demand. 0: no limit."""

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


LEASE_TTL_S = 4.0

_encode = msgspec.msgpack.Encoder().encode
# That follow the name of the exceeded limit in the reply of `ADMIT`.
_NUM_NUMBERS = 7
_LIMIT_NAMES: dict[bytes, LimitName | None] = {name.encode(): name for name in get_args(LimitName)} | {b"": None}


@dataclass(frozen=True, slots=True)
class Reply:
    """Redis's reply to a question.

    Attributes:
        first_ms: Names the batch in which the request's tokens count, if it is admitted.
        running: Sequences of the key that run at all gateways.
        hold_s: How long they usually run.
    """

    verdict: Verdict
    first_ms: int
    running: int
    hold_s: float


class LimitStore:
    """One gateway's access to the limits in Redis."""

    def __init__(self, redis: RedisCache, clock: Callable[[], float]) -> None:
        """Speak in the name of a gateway of its own. `clock` gives Unix seconds."""
        self._redis = redis
        self._clock = clock
        self._gateway = secrets.token_hex(8)
        # Never the same twice, even for an account that was dropped and made anew.
        self._numbers = itertools.count(1)

    async def ask(
        self, key_id: str, account: KeyAccount, limits: Limits, tokens: int, num_sequences: int
    ) -> Reply | None:
        """Count a request if the limits allow it; None when Redis does not answer."""
        wishes = {
            "batch": _milliseconds(BATCH_S),
            "max_requests": limits.requests or 0,
            "max_tokens": limits.tokens or 0,
            "max_running": limits.concurrency or 0,
            "tokens": tokens,
            "sequences": num_sequences,
        }
        # Statements that are made while Redis is asked count the sequences as if they were to run.
        account.num_pending += num_sequences
        try:
            reply, version = await self._run(ADMIT, key_id, account, num_sequences, wishes)
        finally:
            account.num_pending -= num_sequences
        if reply is None:
            return None
        exceeded, retry_ms, requests, used, reset_ms, first_ms, running, hold_ms = reply
        account.is_dirty |= exceeded != b"" and account.version != version
        retry_after_s = max(retry_ms / 1000, 0.0)
        verdict = Verdict(_LIMIT_NAMES[exceeded], retry_after_s, requests, used, reset_ms / 1000)
        return Reply(verdict, first_ms, running, hold_ms / 1000)

    async def state(self, key_id: str, account: KeyAccount) -> bool:
        """Send the running sequences and pending token corrections; return False when Redis does not confirm."""
        reply, _ = await self._run(STATE, key_id, account, 0, {})
        return reply is not None

    async def _run(
        self, script: Script, key_id: str, account: KeyAccount, num_asked: int, wishes: dict[str, int]
    ) -> tuple[Any, int]:
        """Run a script; return its reply, or None when Redis does not answer, and the version that was stated."""
        account.num_calls += 1
        reply: Any = None
        kind = Question if script is ADMIT else Statement
        try:
            # A script that Redis did not know is sent twice, and the second time may come behind later statements.
            for _ in range(2):
                now = self._clock()
                statement = self._statement(account, now, num_asked, kind, wishes)
                account.is_dirty = False
                reply = None
                reply = _read(await self._redis.run_script(script, _keys(key_id), [_encode(statement)]), kind)
                if reply is None or reply[0] != b"stale":
                    break
                reply = None
        finally:
            account.num_calls -= 1
            # Without an answer it is unknown whether Redis has applied it, or still will.
            account.is_dirty |= reply is None
        if reply is not None:
            account.confirm(statement.number, now)
        return reply, statement.version

    def _statement(
        self, account: KeyAccount, now: float, num_asked: int, kind: type[Statement], wishes: dict[str, int]
    ) -> Statement:
        number, corrections = account.corrections(next(self._numbers))
        account.version = next(self._numbers)
        return kind(
            now=_milliseconds(now),
            window=_milliseconds(WINDOW_S),
            ttl=_milliseconds(LEASE_TTL_S),
            gateway=self._gateway,
            version=account.version,
            running=account.running - num_asked,
            hold_ms=_milliseconds(account.holds.mean_s(now)),
            number=number,
            corrections=corrections,
            **wishes,
        )


def _read(reply: Any, kind: type[Statement]) -> list[Any] | None:
    """Return the reply of a script, or None for one that it never sends: of another script, or no Redis at all."""
    words, num_numbers = (_LIMIT_NAMES, _NUM_NUMBERS) if kind is Question else ((b"done",), 0)
    if reply == [b"stale"]:
        return [b"stale"]
    if not isinstance(reply, list) or len(reply) != 1 + num_numbers:
        return None
    word, *numbers = reply
    if not isinstance(word, bytes) or word not in words or not all(isinstance(number, int) for number in numbers):
        return None
    return reply


def _keys(key_id: str) -> list[str]:
    # The braces keep a key's data on one node of a Redis cluster.
    return [f"hr:limit:{{{key_id}}}:window", f"hr:limit:{{{key_id}}}:gateways"]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
