"""A key's limits: requests and tokens per minute, and sequences at once; beyond them, a 429 that says when to return.

Redis decides for all gateways together, in one atomic round trip. Each gateway also keeps its own account of what it
has admitted, which decides while Redis is away: N gateways may then admit N times a limit, but none starts afresh.
Tokens are reserved by estimate at admission and corrected when the request ends. Unlimited keys touch nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable

from gateway.auth import Principal
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.limit_scripts import ADMIT, RELEASE, RENEW
from gateway.limit_window import BATCH_S, WINDOW_S, Batch, KeyUsage, LimitName, Limits, Verdict
from gateway.metrics import GatewayMetrics
from gateway.redis_client import Argument, RedisCache

LEASE_TTL_S = 60.0

# Reserved for an answer whose length the request does not bound.
UNBOUNDED_OUTPUT_TOKENS = 256


def reserved_tokens(generation: Generation) -> int:
    """Tokens to reserve for a request: its prompts as estimated, and all the output it allows itself."""
    max_tokens = generation.sampling.max_tokens
    output = UNBOUNDED_OUTPUT_TOKENS if max_tokens is None else max_tokens
    return generation.estimated_prompt_tokens + generation.num_sequences * output


class Lease:
    """An admitted request's share of its key's limits, until it is released.

    Attributes:
        headers: `x-ratelimit-*` for the answer.
    """

    __slots__ = ("_limiter", "batch", "first_ms", "headers", "key_id", "limits", "members", "tokens")

    def __init__(
        self,
        limiter: RateLimiter,
        key_id: str,
        limits: Limits,
        tokens: int,
        num_sequences: int,
    ) -> None:
        """Made by the rate limiter."""
        lease_id = secrets.token_hex(8)
        self._limiter: RateLimiter | None = limiter
        self.key_id = key_id
        self.limits = limits
        self.tokens = tokens
        self.members = tuple(f"{lease_id}:{index}" for index in range(num_sequences))
        self.batch: Batch | None = None
        self.first_ms: int | None = None
        self.headers: dict[str, str] = {}

    async def release(self, tokens_used: int | None = None) -> None:
        """End the request: its place is free, and the tokens it did not use come back. Later calls do nothing.

        Args:
            tokens_used: Prompt and output tokens; None keeps the estimate.
        """
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            await limiter.release(self, 0 if tokens_used is None else tokens_used - self.tokens)


class UnlimitedLease(Lease):
    """What a key without limits gets: nothing to count, nothing to release."""

    __slots__ = ()

    def __init__(self) -> None:
        """Hold nothing."""
        self.headers = {}

    async def release(self, tokens_used: int | None = None) -> None:
        """Do nothing."""


class RateLimiter:
    """The limits of all keys, as this gateway sees them. Run `renew_forever()` beside it."""

    def __init__(
        self, redis: RedisCache | None, metrics: GatewayMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        """Limit by Redis where there is one.

        Args:
            redis: Where gateways meet; None for a gateway that is alone.
            metrics: Counts refusals by limit.
            clock: Unix seconds.
        """
        self._redis = redis
        self._metrics = metrics
        self._clock = clock
        self._usage: defaultdict[str, KeyUsage] = defaultdict(KeyUsage)
        self._running: set[Lease] = set()
        self._unlimited = UnlimitedLease()

    async def admit(self, principal: Principal, num_sequences: int, tokens: int) -> Lease:
        """Count one request against its key's limits.

        Args:
            principal: Whose limits.
            num_sequences: How many it runs at once.
            tokens: Estimate to reserve, see `reserved_tokens`.

        Raises:
            ApiError: 429 with the time after which it would be admitted; 400 when it never would.
        """
        if principal.is_unlimited:
            return self._unlimited
        limits = Limits(principal.requests_per_minute, principal.tokens_per_minute, principal.max_concurrent)
        _check_possible(limits, num_sequences, tokens)
        lease = Lease(self, principal.key_id, limits, tokens, num_sequences)
        verdict = await self._admit_everywhere(lease)
        usage = self._usage[principal.key_id]
        if verdict is None:
            verdict, lease.batch = usage.admit(self._clock(), limits, tokens, num_sequences)
        elif verdict.exceeded is None:
            lease.batch = usage.record(self._clock(), tokens, num_sequences)
        if verdict.exceeded is not None:
            raise self._refusal(limits, verdict)
        lease.headers = _headers(limits, verdict)
        self._running.add(lease)
        return lease

    async def release(self, lease: Lease, token_change: int) -> None:
        """Free a lease's place and correct its tokens; see `Lease.release`."""
        self._running.discard(lease)
        usage = self._usage[lease.key_id]
        usage.running -= len(lease.members)
        if lease.batch is not None:
            usage.adjust(lease.batch, token_change)
        members = lease.members if lease.limits.concurrency is not None else ()
        if self._redis is not None and (members or (token_change and lease.first_ms is not None)):
            times = (_milliseconds(self._clock()), _milliseconds(WINDOW_S))
            change = token_change if lease.first_ms is not None else 0
            await self._redis.eval(RELEASE, _keys(lease.key_id), [*times, lease.first_ms or 0, change, *members])

    async def renew_forever(self) -> None:
        """Renew the leases of running requests, so that only those of a dead gateway lapse."""
        while True:
            await asyncio.sleep(LEASE_TTL_S / 3)
            await self.renew()

    async def renew(self) -> None:
        """Renew the leases of running requests once."""
        members: defaultdict[str, list[str]] = defaultdict(list)
        for lease in self._running:
            if lease.limits.concurrency is not None:
                members[lease.key_id].extend(lease.members)
        if self._redis is not None:
            now, ttl = _milliseconds(self._clock()), _milliseconds(LEASE_TTL_S)
            for key_id, names in members.items():
                await self._redis.eval(RENEW, _keys(key_id)[1:], [now, ttl, *names])

    async def _admit_everywhere(self, lease: Lease) -> Verdict | None:
        if self._redis is None:
            return None
        limits = lease.limits
        times = (_milliseconds(self._clock()), _milliseconds(WINDOW_S), _milliseconds(BATCH_S))
        bounds = (limits.requests or 0, limits.tokens or 0, limits.concurrency or 0)
        arguments: list[Argument] = [*times, *bounds, lease.tokens, _milliseconds(LEASE_TTL_S), *lease.members]
        reply = await self._redis.eval(ADMIT, _keys(lease.key_id), arguments)
        if reply is None:
            return None
        exceeded, retry_ms, requests, tokens, reset_ms, first_ms = reply
        lease.first_ms = first_ms
        return Verdict(_LIMIT_NAMES[exceeded], max(retry_ms / 1000, 0.0), requests, tokens, reset_ms / 1000)

    def _refusal(self, limits: Limits, verdict: Verdict) -> ApiError:
        assert verdict.exceeded is not None
        self._metrics.limited[verdict.exceeded] += 1
        retry_after_s = verdict.retry_after_s or 1.0
        what, limit = _DESCRIPTIONS[verdict.exceeded], getattr(limits, verdict.exceeded)
        return ApiError(
            429,
            f"Rate limit reached for this key: {limit} {what}. Try again in {retry_after_s:.1f} s.",
            code="rate_limit_exceeded",
            retry_after_s=retry_after_s,
            headers=_headers(limits, verdict),
        )


_LIMIT_NAMES: dict[bytes, LimitName | None] = {
    b"": None,
    b"requests": "requests",
    b"tokens": "tokens",
    b"concurrency": "concurrency",
}
_DESCRIPTIONS: dict[LimitName, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrency": "sequences at once",
}


def _check_possible(limits: Limits, num_sequences: int, tokens: int) -> None:
    if limits.tokens is not None and tokens > limits.tokens:
        message = f"The request may use {tokens} tokens, but this key's limit is {limits.tokens} per minute."
        raise ApiError(400, f"{message} Lower 'max_tokens'.", param="max_tokens", code="request_too_large")
    if limits.concurrency is not None and num_sequences > limits.concurrency:
        message = f"The request makes {num_sequences} sequences, but this key's limit is {limits.concurrency} at once."
        raise ApiError(400, f"{message} Lower 'n'.", param="n", code="request_too_large")


def _headers(limits: Limits, verdict: Verdict) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, limit, used in (
        ("requests", limits.requests, verdict.requests),
        ("tokens", limits.tokens, verdict.tokens),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, limit - used))
            headers[f"x-ratelimit-reset-{name}"] = f"{verdict.reset_s if used else 0.0:.3f}s"
    return headers


def _keys(key_id: str) -> list[str]:
    # The braces keep a key's data on one node of a Redis cluster.
    return [f"hr:limit:{{{key_id}}}:window", f"hr:limit:{{{key_id}}}:running"]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
