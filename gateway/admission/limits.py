"""Limits of keys and tenants, beyond which a 429 says when to return: requests, tokens, reads, sequences at once.

Redis decides for all gateways together, in one atomic round trip. Each gateway's own account decides while Redis is
away: N gateways may then admit N times a limit, but none starts afresh. Tokens are reserved by estimate and corrected
when the request ends. A request counts against its key first, then against its tenant, so a key beyond its
limit takes nothing from others. A gateway states in Redis how many sequences of a key it runs, whenever that changes
and once in `RENEW_S`, until Redis confirms it; statements expire with their gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from gateway.admission.auth import Principal
from gateway.admission.limit_account import WINDOW_S, Batch, KeyAccount, Limits, Verdict
from gateway.admission.limit_store import LimitStore
from gateway.cache.redis_client import RedisCache
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics

RENEW_S = 1.0
# Pause after a statement that Redis did not confirm.
RETRY_S = 0.25

# Size of one read: stored bytes, records of a list, or days or hours of usage. Larger reads count several
# times.
READ_BYTES = 64 << 10
READ_RECORDS = 16
READ_PERIODS = 8
# Reserved for an answer whose length the request does not bound.
UNBOUNDED_OUTPUT_TOKENS = 256


class Output(NamedTuple):
    """The part of a request's tokens that is for its answers: their number, and `max_tokens` of each."""

    num_answers: int = 0
    max_tokens: int = 0

    def fitting(self, tokens: int, limit: int) -> int | None:
        """Return the largest `max_tokens` with which a request of `tokens` is within a limit, if there is one."""
        num_prompt = tokens - self.num_answers * self.max_tokens
        fitting = (limit - num_prompt) // self.num_answers if self.num_answers else 0
        return fitting if fitting > 0 else None


NO_OUTPUT = Output()


def reserved_tokens(generation: Generation) -> tuple[int, Output]:
    """Tokens to reserve for a request, its prompts as estimated and all output it allows itself; and that output."""
    num, limit = generation.num_sequences, generation.sampling.max_tokens
    limit = UNBOUNDED_OUTPUT_TOKENS if limit is None else limit
    return generation.estimated_prompt_tokens + num * limit, Output(num, limit)


class Lease:
    """An admitted request's share of its key's limits, until it is released.

    Attributes:
        batch: Where this gateway counts its tokens.
        first_ms: Names the batch in which Redis counts them, if Redis admitted it.
        headers: `x-ratelimit-*` for the answer.
        of_tenant: Its share of the tenant's limits, if the tenant has any.
    """

    __slots__ = ("_limiter", "batch", "first_ms", "headers", "key_id", "of_tenant", "tokens")

    def __init__(self, limiter: RateLimiter, key_id: str, tokens: int) -> None:
        self._limiter: RateLimiter | None = limiter
        self.key_id = key_id
        self.tokens = tokens
        self.batch: Batch | None = None
        self.first_ms: int | None = None
        self.headers: dict[str, str] = {}
        self.of_tenant: Lease | None = None

    def release(self, tokens_used: int | None = None) -> None:
        """End the request: its place is free, and the tokens it did not use come back. Later calls do nothing.

        Args:
            tokens_used: Prompt and output tokens; None keeps the estimate.
        """
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.release(self, 0 if tokens_used is None else tokens_used - self.tokens)
        if self.of_tenant is not None:
            self.of_tenant.release(tokens_used)


class UnlimitedLease(Lease):
    """The lease of a key without limits: nothing to count, nothing to release."""

    __slots__ = ()

    def __init__(self) -> None:
        self.headers = {}

    def release(self, tokens_used: int | None = None) -> None:
        """Do nothing."""


class RateLimiter:
    """The limits of all keys, as this gateway sees them. Run `state_forever()` beside it."""

    def __init__(
        self, redis: RedisCache | None, metrics: GatewayMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = None if redis is None else LimitStore(redis, clock)
        self._metrics = metrics
        self._clock = clock
        self._accounts: defaultdict[str, KeyAccount] = defaultdict(KeyAccount)
        self._wake = asyncio.Event()
        self._unlimited = UnlimitedLease()

    async def admit(self, principal: Principal, num_sequences: int, tokens: int, output: Output = NO_OUTPUT) -> Lease:
        """Count one request against the limits of its key and its tenant; `ApiError` 429, or 400 if it never fits.

        `tokens` is the estimate to reserve; `output` the part of it that the client can make smaller.
        """
        if principal.is_unlimited:
            return self._unlimited
        limited = _limits_of(principal)
        for _, limits in limited:
            _check_possible(limits, num_sequences, tokens, output)
        lease = await self._admit(*limited[0], num_sequences, tokens, output)
        if len(limited) == 1:
            return lease
        try:
            lease.of_tenant = await self._admit(*limited[1], num_sequences, tokens, output)
        except BaseException:
            lease.release(0)
            raise
        lease.headers = _tighter(lease.headers, lease.of_tenant.headers)
        return lease

    async def admit_read(self, principal: Principal) -> Lease:
        """Count one read against its key's limit, or raise `ApiError` 429; releasing the lease adds the read's size."""
        if principal.reads_per_minute is None:
            return self._unlimited
        limits = Limits(requests=None, tokens=principal.reads_per_minute, concurrency=None, are_reads=True)
        return await self._admit(f"{principal.key_id}/reads", limits, 0, 1)

    async def _admit(
        self, key_id: str, limits: Limits, num_sequences: int, tokens: int, output: Output = NO_OUTPUT
    ) -> Lease:
        lease = Lease(self, key_id, tokens)
        account = self._accounts[key_id]
        account.is_counted = limits.concurrency is not None
        reply = None
        if self._store is not None:
            try:
                reply = await self._store.ask(key_id, account, limits, tokens, num_sequences)
            finally:
                if account.is_dirty:
                    self._wake.set()
        now = self._clock()
        if reply is None:
            verdict, lease.batch = account.usage.admit(now, limits, tokens, num_sequences)
            running, hold_s = account.usage.running, account.holds.mean_s(now)
        else:
            verdict, running, hold_s = reply.verdict, reply.running, reply.hold_s
            if verdict.exceeded is None:
                lease.batch, lease.first_ms = account.usage.record(now, tokens, num_sequences), reply.first_ms
        if verdict.exceeded is not None:
            if verdict.exceeded == "concurrency" and limits.concurrency is not None:
                missing = running + num_sequences - limits.concurrency
                # The header has whole seconds, and the text says the same.
                wait_s = max(1.0, account.holds.wait_s(self._clock(), missing, running, hold_s))
                verdict = replace(verdict, retry_after_s=wait_s)
            raise self._refusal(limits, verdict, tokens, output)
        account.holds.begin(lease, now, num_sequences)
        lease.headers = _headers(limits, verdict)
        return lease

    def release(self, lease: Lease, token_change: int) -> None:
        """Free a lease's place and correct its tokens; see `Lease.release`."""
        account, now = self._accounts[lease.key_id], self._clock()
        account.end(lease, now)
        if lease.batch is not None:
            account.usage.adjust(lease.batch, token_change)
        if token_change and lease.first_ms is not None:
            account.correct(lease.first_ms, token_change, now)
        self._wake.set()

    async def state_forever(self) -> None:
        """Tell Redis what has changed, and what runs, so that only the accounts of a dead gateway expire."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._wake.wait()
            self._wake.clear()
            if not await self.state():
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def state(self) -> bool:
        """Tell Redis once; False if it did not confirm everything."""
        store, now = self._store, self._clock()
        stating = []
        for key_id, account in list(self._accounts.items()):
            account.usage.forget_before(now - WINDOW_S)
            account.is_dirty &= store is not None
            is_due = account.is_counted and account.running > 0 and now - account.stated_at >= RENEW_S / 2
            if account.is_idle:
                del self._accounts[key_id]
            elif store is not None and (account.is_dirty or is_due):
                stating.append(store.state(key_id, account))
        return all(await asyncio.gather(*stating))

    def _refusal(self, limits: Limits, verdict: Verdict, tokens: int, output: Output) -> ApiError:
        assert verdict.exceeded is not None
        name = "reads" if limits.are_reads else verdict.exceeded
        self._metrics.limited[name] += 1
        retry_after_s = verdict.retry_after_s
        # Who comes back when the text says so is to be admitted.
        rounded_up_s = max(0.1, math.ceil(round(retry_after_s * 10, 3)) / 10)
        what, limit = _DESCRIPTIONS[name], getattr(limits, verdict.exceeded)
        return ApiError(
            429,
            f"Rate limit reached for this {limits.owner}: {limit} {what}.{_left(limits, verdict, tokens, output)} "
            f"Try again in {rounded_up_s:.1f} s.",
            code="rate_limit_exceeded",
            type="tokens" if name == "tokens" else "requests",
            retry_after_s=retry_after_s,
            headers=_headers(limits, verdict),
        )


_DESCRIPTIONS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrency": "sequences at once",
    "reads": f"reads of stored data per minute (one for each {READ_BYTES >> 10} kB, "
    f"{READ_RECORDS} records of a list, or {READ_PERIODS} days or hours of usage)",
}


def _left(limits: Limits, verdict: Verdict, tokens: int, output: Output) -> str:
    if verdict.exceeded != "tokens" or limits.tokens is None or limits.are_reads:
        return ""
    left = max(0, limits.tokens - verdict.tokens)
    told = f" This request reserves {tokens} tokens (its prompt and 'max_tokens' for each answer), {left} are left"
    fitting = output.fitting(tokens, left)
    return f"{told}." if fitting is None else f"{told}: with 'max_tokens' of at most {fitting} it would fit now."


def _limits_of(principal: Principal) -> list[tuple[str, Limits]]:
    own = Limits(principal.requests_per_minute, principal.tokens_per_minute, principal.max_concurrent)
    limited = [] if own == Limits(None, None, None) else [(principal.key_id, own)]
    if (of_tenant := principal.tenant_limits) is not None:
        shared = (of_tenant.requests_per_minute, of_tenant.tokens_per_minute, of_tenant.max_concurrent)
        limited.append((f"tenant/{principal.tenant}", Limits(*shared, owner="tenant")))
    return limited


def _tighter(first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
    """Return the headers of two limits: of each kind those of which less is left."""
    found = dict(first)
    for kind in ("requests", "tokens"):
        left = f"x-ratelimit-remaining-{kind}"
        if left in second and int(second[left]) < int(first.get(left, sys.maxsize)):
            found |= {name: value for name, value in second.items() if name.endswith(f"-{kind}")}
    return found


def _check_possible(limits: Limits, num_sequences: int, tokens: int, output: Output) -> None:
    if limits.tokens is not None and tokens > limits.tokens:
        message = f"The request may use {tokens} tokens, but this {limits.owner}'s limit is {limits.tokens} per minute."
        fitting = output.fitting(tokens, limits.tokens)
        remedy = "Shorten the prompt." if fitting is None else f"Lower 'max_tokens' to {fitting} or less."
        raise ApiError(400, f"{message} {remedy}", param="max_tokens", code="request_too_large")
    if limits.concurrency is not None and num_sequences > limits.concurrency:
        limit = f"this {limits.owner}'s limit is {limits.concurrency} at once"
        message = f"The request makes {num_sequences} sequences, but {limit}."
        raise ApiError(400, f"{message} Lower 'n' or 'best_of'.", param="n", code="request_too_large")


def _headers(limits: Limits, verdict: Verdict) -> dict[str, str]:
    headers: dict[str, str] = {}
    if limits.are_reads:
        return headers
    kinds = (("requests", limits.requests, verdict.requests), ("tokens", limits.tokens, verdict.tokens))
    for name, limit, used in kinds:
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, limit - used))
            headers[f"x-ratelimit-reset-{name}"] = f"{verdict.reset_s if used else 0.0:.3f}s"
    return headers
