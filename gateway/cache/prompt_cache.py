"""The response cache: exact answers of deterministic requests, in Redis and in memory, isolated by tenant.

The key is the SHA-256 of everything that decides the answer. A value carries the tenant and the full key and is checked
when read. Values are the deltas themselves: a hit is sent through the same sinks as a live answer. Every failure of
Redis is a miss. Answers that were written or read lately are also kept in this process, no longer than in Redis.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from gateway.cache.recording import as_cached, is_complete
from gateway.cache.redis_client import RedisCache
from gateway.generation import Generation
from shared.messages import UNDECODABLE, Delta

# What an entry takes beside its value: key, entry, numbers, and their places in the table.
ENTRY_BYTES = 300

Sequences = list[list[Delta]]


@dataclass(slots=True)
class _Entry:
    value: bytes
    expires_at: float


class AnswerMemory:
    """Answers by the digest of their request, least recently used out first: at most `max_bytes`; none with 0."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.num_bytes = 0

    def get(self, digest: bytes, now: float) -> bytes | None:
        """Return an answer whose time is not over. `now` is Unix seconds, here and below."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if entry.expires_at <= now:
            self.drop(digest)
            return None
        self._entries.move_to_end(digest)
        return entry.value

    def put(self, digest: bytes, value: bytes, expires_at: float) -> None:
        """Keep an answer until `expires_at`, or until others have been wanted more recently."""
        self.drop(digest)
        if len(value) + ENTRY_BYTES > self._max_bytes:
            return
        self._entries[digest] = _Entry(value, expires_at)
        self.num_bytes += len(value) + ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, digest: bytes) -> None:
        """Forget an answer, if it is there."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.num_bytes -= len(entry.value) + ENTRY_BYTES


FORMAT_VERSION = 4
TTL_JITTER = 0.2

_logger = logging.getLogger(__name__)


class CacheKey(msgspec.Struct, frozen=True):
    """Whose answer, and the digest of all that decides it, `revisions` of the model's workers among that."""

    tenant: str
    digest: bytes
    revisions: tuple[str, ...] = ()


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    tenant: str
    digest: bytes
    sequences: list[list[Delta]]
    # Unix seconds.
    expires_at: float


def cache_key(tenant: str, generation: Generation, revisions: tuple[str, ...]) -> CacheKey:
    """Return the key of a deterministic generation: equal requests have equal keys, however they are written.

    `revisions` are fingerprints of the model's files, since a name may serve other weights tomorrow.
    """
    sampling = generation.sampling
    if sampling.temperature == 0:
        sampling = msgspec.structs.replace(sampling, seed=0, top_p=1.0, top_k=0, min_p=0.0)
    # In a fixed order, because a map's own order is how the client wrote it.
    biases = sorted(sampling.logit_bias.items())
    sampling = msgspec.structs.replace(sampling, logit_bias={})
    prompts = [(p.messages, p.chat, p.text, p.token_ids, p.query, p.suffix, *p.media) for p in generation.prompts]
    model = (generation.model, generation.adapter, revisions)
    # Deltas are kept as they came, so what they hold beside the text counts too.
    has_token_ids = generation.details is not None and generation.details.needs_prompt_ids
    reading = (generation.add_special_tokens, generation.truncate_prompt_tokens, generation.cache_salt)
    budget = () if generation.kv_budget is None else (generation.kv_budget,)
    options = (generation.n, generation.echo, reading, has_token_ids, *budget)
    material = (FORMAT_VERSION, tenant, model, prompts, sampling, biases, options, generation.pooling)
    return CacheKey(tenant, hashlib.sha256(msgspec.msgpack.encode(material)).digest(), revisions)


class PromptCache:
    """Answers in Redis, some of them in memory too. With a lifetime of 0 or without Redis it is always empty."""

    def __init__(
        self,
        redis: RedisCache | None,
        ttl_s: float,
        max_value_bytes: int,
        max_memory_bytes: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep answers of at most `max_value_bytes` for about `ttl_s` seconds, and `max_memory_bytes` of them here.

        `clock` is in Unix seconds.
        """
        self._memory = AnswerMemory(max_memory_bytes)
        self._clock = clock
        self._redis = redis if ttl_s > 0 else None
        self._ttl_s = ttl_s
        self._max_value_bytes = max_value_bytes
        self._decode = msgspec.msgpack.Decoder(_Stored).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def remembered(self, key: CacheKey) -> Sequences | None:
        """Return what `get` returns, without asking Redis."""
        value = None if self._redis is None else self._memory.get(key.digest, self._clock())
        stored = None if value is None else self._read(key, value)
        return None if stored is None else _cached(stored)

    async def get(self, key: CacheKey) -> Sequences | None:
        """Return the deltas of each sequence of a cached answer, or None; each sequence has its end."""
        remembered = self.remembered(key)
        if remembered is not None or self._redis is None:
            return remembered
        value = await self._redis.get(_redis_key(key))
        stored = None if value is None else self._read(key, value)
        if value is None or stored is None:
            return None
        self._memory.put(key.digest, value, stored.expires_at)
        return _cached(stored)

    def _read(self, key: CacheKey, value: bytes) -> _Stored | None:
        """Return what a value says, if it is the answer to this key."""
        try:
            stored = self._decode(value)
        except UNDECODABLE as error:
            _logger.warning("a cached answer cannot be read: %s", error)
            return None
        if (stored.version, stored.tenant, stored.digest) != (FORMAT_VERSION, key.tenant, key.digest):
            _logger.warning("a cached answer belongs to another request and was ignored")
            return None
        if not all(map(is_complete, stored.sequences)):
            _logger.warning("a cached answer is not complete and was ignored")
            return None
        return stored

    async def put(self, key: CacheKey, sequences: Sequence[Sequence[Delta]]) -> None:
        """Keep an answer, unless it is not complete or too large."""
        if self._redis is None or not all(map(is_complete, sequences)):
            return
        anonymous = [[msgspec.structs.replace(delta, id="", epoch=0) for delta in deltas] for deltas in sequences]
        ttl_s = self._ttl_s * random.uniform(1 - TTL_JITTER, 1 + TTL_JITTER)
        expires_at = self._clock() + ttl_s
        value = self._encode(_Stored(FORMAT_VERSION, key.tenant, key.digest, anonymous, expires_at))
        if len(value) <= self._max_value_bytes:
            self._memory.put(key.digest, value, expires_at)
            await self._redis.set(_redis_key(key), value, ttl_s)


def _cached(stored: _Stored) -> Sequences:
    return [[as_cached(delta) for delta in deltas] for deltas in stored.sequences]


def _redis_key(key: CacheKey) -> str:
    return f"hr:answer:{key.digest.hex()}"
