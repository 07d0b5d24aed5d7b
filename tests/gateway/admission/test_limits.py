"""Rate limits: never more than the limit in any minute, over gateways that share a Redis, and without one."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.api_keys import MAX_LIMIT, TenantRecord
from gateway.admission.auth import Principal
from gateway.admission.limit_account import WINDOW_S, KeyAccount
from gateway.admission.limit_store import LEASE_TTL_S
from gateway.admission.limits import NO_OUTPUT, RENEW_S, RETRY_S, Lease, Output, RateLimiter, reserved_tokens
from gateway.api.schemas.parsing import parse_completion
from gateway.cache.redis_client import RedisCache
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from tests.clock import Clock
from tests.gateway.wire_worker import until
from tests.servers import RedisServer

REDIS_TIMEOUT_S = 2.0
SHORT_S = 0.1
NOW = 1_700_000_000.0


@dataclass
class Admissions:
    """What was admitted when, to be checked against the limit afterwards."""

    times: list[float] = field(default_factory=list)
    amounts: list[int] = field(default_factory=list)

    def add(self, time: float, amount: int) -> None:
        self.times.append(time)
        self.amounts.append(amount)

    def most_in_any_window(self) -> int:
        pairs = list(zip(self.times, self.amounts, strict=True))
        return max((sum(a for t, a in pairs if end - WINDOW_S < t <= end) for end in self.times), default=0)


def limited(requests: int | None = None, tokens: int | None = None, concurrent: int | None = None) -> Principal:
    return Principal(f"key_{secrets.token_hex(8)}", "acme", None, requests, tokens, concurrent)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisCache]:
    cache = RedisCache(redis_url, REDIS_TIMEOUT_S, GatewayMetrics())
    await cache.start()
    yield cache
    await cache.close()


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


@pytest.fixture(params=[False, True], ids=["alone", "shared"])
def limiter(request: pytest.FixtureRequest, redis: RedisCache, clock: Clock) -> RateLimiter:
    """A limiter without Redis, and one with it."""
    return RateLimiter(redis if request.param else None, GatewayMetrics(), clock)


async def refused(
    limiter: RateLimiter, principal: Principal, sequences: int = 1, tokens: int = 1, output: Output = NO_OUTPUT
) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await limiter.admit(principal, sequences, tokens, output)
    return caught.value


Attempts = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.01, 0.4, 1.0, 3.0, 29.0, 59.0, 60.0, 61.0]),  # time that passes before the attempt
        st.integers(0, 1),  # which gateway
        st.integers(1, 40),  # tokens
    ),
    min_size=15,
    max_size=60,
)


async def attempt_all(limiters: list[RateLimiter], clock: Clock, attempts: list[tuple[float, int, int]]) -> None:
    """Make the attempts; check the windows, and that a refusal's time is enough and not longer than needed."""
    principal = limited(requests=7, tokens=100)
    requests, used = Admissions(), Admissions()
    for wait_s, which, tokens in attempts:
        clock.now += wait_s
        try:
            await limiters[which].admit(principal, 1, tokens)
        except ApiError as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            assert refusal.status == 429
            assert refusal.retry_after_s is not None
            assert 0 < refusal.retry_after_s <= WINDOW_S
            told_s = float(refusal.message.rpartition("Try again in ")[2].removesuffix(" s."))
            assert refusal.retry_after_s - 0.001 <= told_s <= refusal.retry_after_s + 0.101
            clock.now += refusal.retry_after_s - 0.002
            assert (await refused(limiters[which], principal, 1, tokens)).status == 429
            clock.now += 0.003
            await limiters[which].admit(principal, 1, tokens)
        requests.add(clock.now, 1)
        used.add(clock.now, tokens)
    assert requests.most_in_any_window() <= 7
    assert used.most_in_any_window() <= 100


@given(attempts=Attempts)
@settings(max_examples=60)
async def test_one_gateway_never_admits_more_than_the_limit_in_any_window(
    attempts: list[tuple[float, int, int]],
) -> None:
    clock = Clock(NOW)
    limiter = RateLimiter(None, GatewayMetrics(), clock)
    await attempt_all([limiter, limiter], clock, attempts)


@given(attempts=Attempts)
@settings(max_examples=25)
async def test_gateways_sharing_redis_never_admit_more_than_the_limit_in_any_window(
    redis_url: str, attempts: list[tuple[float, int, int]]
) -> None:
    cache = RedisCache(redis_url, REDIS_TIMEOUT_S, GatewayMetrics())
    await cache.start()
    assert cache.is_available
    clock = Clock(NOW)
    try:
        await attempt_all([RateLimiter(cache, GatewayMetrics(), clock) for _ in range(2)], clock, attempts)
    finally:
        await cache.close()


@pytest.mark.parametrize(
    ("limits", "tokens", "wait_s"),
    [
        ({"requests": 3}, 1, 35),
        ({"tokens": 90}, 20, 35),
        ({"tokens": 90}, 31, 45),
        # The request waits for both limits, so it is told the longer time.
        ({"requests": 3, "tokens": 90}, 31, 45),
        ({"requests": 3, "tokens": 90}, 61, 55),
    ],
)
async def test_refusal_tells_when_enough_has_left_the_window_and_no_later(
    limiter: RateLimiter, clock: Clock, limits: dict[str, int], tokens: int, wait_s: float
) -> None:
    principal = limited(**limits)
    for _ in range(3):
        # Tokens up to the limit itself are admitted.
        await limiter.admit(principal, 1, 30)
        clock.now += 10
    clock.now -= 5
    assert (await refused(limiter, principal, tokens=tokens)).retry_after_s == pytest.approx(wait_s)


async def test_tokens_that_come_back_after_their_minute_count_in_no_other(limiter: RateLimiter, clock: Clock) -> None:
    principal = limited(tokens=100)
    slow = await limiter.admit(principal, 1, 90)
    clock.now += WINDOW_S + 1
    await limiter.admit(principal, 1, 50)
    slow.release(10)
    await limiter.state()
    assert (await refused(limiter, principal, tokens=51)).headers["x-ratelimit-remaining-tokens"] == "50"


async def test_statement_that_redis_does_not_confirm_is_repeated_without_haste(
    redis: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    async def no_answer(*_: object) -> None:
        asked.append(time.monotonic())

    # Nothing is stated because it is time for it.
    monkeypatch.setattr("gateway.admission.limits.RENEW_S", 3600.0)
    limiter = RateLimiter(redis, GatewayMetrics(), Clock(NOW))
    lease = await limiter.admit(limited(concurrent=1), 1, 1)
    monkeypatch.setattr(redis, "run_script", no_answer)
    lease.release()
    stating = asyncio.create_task(limiter.state_forever())
    await until(lambda: len(asked) >= 3)
    stating.cancel()
    assert asked[2] - asked[0] >= 1.9 * RETRY_S


async def test_many_clients_at_once_on_two_gateways_share_one_limit(redis: RedisCache) -> None:
    limiters = [RateLimiter(redis, GatewayMetrics()) for _ in range(2)]
    principal = limited(requests=50)
    results = await asyncio.gather(
        *(limiters[i % 2].admit(principal, 1, 1) for i in range(200)), return_exceptions=True
    )
    assert sum(isinstance(result, Lease) for result in results) == 50


async def test_redis_killed_in_the_middle_leaves_each_gateway_with_its_own_limit(
    start_redis: Callable[..., RedisServer],
) -> None:
    server = start_redis()
    caches = [RedisCache(server.url, SHORT_S, GatewayMetrics()) for _ in range(2)]
    for cache in caches:
        await cache.start()
    limiters = [RateLimiter(cache, GatewayMetrics()) for cache in caches]
    principal = limited(requests=40)
    admitted = [0, 0]
    statuses = set()
    for i in range(200):
        if i == 20:
            server.kill()
            killed_at = time.monotonic()
        try:
            await limiters[i % 2].admit(principal, 1, 1)
            admitted[i % 2] += 1
        except ApiError as error:
            statuses.add(error.status)
    assert admitted == [40, 40]
    assert statuses == {429}
    # Had each waited for Redis, it would have been three times as long.
    assert time.monotonic() - killed_at < 60 * SHORT_S
    for cache in caches:
        await cache.close()


async def test_tokens_not_used_come_back_and_tokens_used_too_much_are_counted(limiter: RateLimiter) -> None:
    principal = limited(tokens=100)
    lease = await limiter.admit(principal, 1, 90)
    assert lease.headers["x-ratelimit-remaining-tokens"] == "10"
    assert (await refused(limiter, principal, tokens=20)).code == "rate_limit_exceeded"
    lease.release(30)
    lease.release(30)
    second = await limiter.admit(principal, 1, 60)
    assert second.headers["x-ratelimit-remaining-tokens"] == "10"
    second.release(75)
    refusal = await refused(limiter, principal, tokens=1)
    assert refusal.headers["x-ratelimit-remaining-tokens"] == "0"
    # It has used 105 of 100.
    assert ", 0 are left" in refusal.message


async def test_concurrency_counts_sequences_until_they_are_released(limiter: RateLimiter) -> None:
    principal = limited(concurrent=4)
    lease = await limiter.admit(principal, 3, 1)
    error = await refused(limiter, principal, sequences=2)
    assert (error.status, error.retry_after_s) == (429, 1.0)
    assert +limiter._metrics.limited == {"concurrency": 1}
    await limiter.admit(principal, 1, 1)
    lease.release()
    await limiter.admit(principal, 3, 1)


async def test_leases_of_a_dead_gateway_lapse_and_those_of_a_living_one_stay(redis: RedisCache) -> None:
    clock = Clock(NOW)
    dead, living = (RateLimiter(redis, GatewayMetrics(), clock) for _ in range(2))
    principal = limited(concurrent=2)
    await dead.admit(principal, 1, 1)
    await living.admit(principal, 1, 1)
    third = RateLimiter(redis, GatewayMetrics(), clock)
    await refused(third, principal)
    assert LEASE_TTL_S <= 5
    clock.now += LEASE_TTL_S * 0.6
    assert await living.state()
    clock.now += LEASE_TTL_S * 0.6
    await third.admit(principal, 1, 1)
    await refused(third, principal)


async def test_admission_cancelled_while_redis_is_asked_leaves_nothing_behind(redis: RedisCache) -> None:
    limiter = RateLimiter(redis, GatewayMetrics())
    principal = limited(requests=1)
    task = asyncio.create_task(limiter.admit(principal, 1, 1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    own = limiter._accounts[principal.key_id].usage
    assert (own.requests, own.tokens, own.running) == (0, 0, 0)


async def test_redis_is_told_soon_that_an_admission_was_given_up(
    redis: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is stated because it is time for it, and nothing expires.
    monkeypatch.setattr("gateway.admission.limits.RENEW_S", 3600.0)
    monkeypatch.setattr("gateway.admission.limit_store.LEASE_TTL_S", 3600.0)
    ours, other = (RateLimiter(redis, GatewayMetrics()) for _ in range(2))
    principal = limited(concurrent=1)
    run_script = redis.run_script
    is_counted = asyncio.Event()

    async def answered_late(*arguments: Any) -> object:
        answer = await run_script(*arguments)
        is_counted.set()
        await asyncio.sleep(3600)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(redis, "run_script", answered_late)
        asking = asyncio.create_task(ours.admit(principal, 1, 1))
        await is_counted.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await refused(other, principal)
    stating = asyncio.create_task(ours.state_forever())
    async with asyncio.timeout(10):
        while True:
            try:
                await other.admit(principal, 1, 1)
            except ApiError:
                await asyncio.sleep(0.01)
            else:
                break
    stating.cancel()


@pytest.mark.parametrize(("sequences", "wait_s"), [(1, 4.0), (3, 10.0)])
async def test_request_of_more_sequences_is_told_to_wait_for_more_to_end(sequences: int, wait_s: float) -> None:
    clock = Clock(NOW)
    limiter = RateLimiter(None, GatewayMetrics(), clock)
    principal = limited(concurrent=3)
    known = await limiter.admit(principal, 1, 1)
    clock.now += 10
    known.release()
    for _ in range(3):
        await limiter.admit(principal, 1, 1)
        clock.now += 2
    # Each runs 10 s, and they began 6, 4 and 2 s ago.
    error = await refused(limiter, principal, sequences)
    assert error.retry_after_s == pytest.approx(wait_s)


def of_tenant(key: Principal, **limits: int) -> Principal:
    return dataclasses.replace(key, tenant_limits=TenantRecord(tenant=key.tenant, **limits))


@pytest.mark.parametrize("shared", [False, True])
async def test_keys_of_a_tenant_share_its_limits(redis: RedisCache, shared: bool) -> None:
    tenant = f"t{secrets.token_hex(6)}"
    limiters = [RateLimiter(redis if shared else None, GatewayMetrics()) for _ in range(2 if shared else 1)]
    limits = {"requests_per_minute": 5, "max_concurrent": 2}
    first, second = (of_tenant(dataclasses.replace(limited(requests=9), tenant=tenant), **limits) for _ in range(2))
    leases = [await limiters[0].admit(first, 1, 1), await limiters[-1].admit(second, 1, 1)]
    error = await refused(limiters[-1], first)
    assert error.message.startswith("Rate limit reached for this tenant: 2 sequences at once.")
    for lease in leases:
        lease.release(1)
    for limiter in limiters:
        await limiter.state()
    again = await limiters[0].admit(second, 1, 1)
    # Of the tenant's requests three are gone, of this key's two.
    assert (again.headers["x-ratelimit-limit-requests"], again.headers["x-ratelimit-remaining-requests"]) == ("5", "2")


async def test_key_beyond_its_own_limit_takes_nothing_from_its_tenant() -> None:
    limiter = RateLimiter(None, GatewayMetrics())
    small, other = (of_tenant(limited(requests=each), requests_per_minute=3) for each in (1, None))
    await limiter.admit(small, 1, 1)
    for _ in range(5):
        assert "for this key: 1 requests" in (await refused(limiter, small)).message
    for _ in range(2):
        await limiter.admit(other, 1, 1)
    assert "for this tenant: 3 requests" in (await refused(limiter, other)).message


async def test_key_without_limits_counts_against_its_tenant_alone() -> None:
    limiter = RateLimiter(None, GatewayMetrics())
    key = of_tenant(limited(), tokens_per_minute=10)
    assert not key.is_unlimited
    lease = await limiter.admit(key, 1, 8)
    assert lease.headers["x-ratelimit-remaining-tokens"] == "2"
    lease.release(1)
    await limiter.admit(key, 1, 9)
    with pytest.raises(ApiError, match="this tenant's limit is 10 per minute"):
        await limiter.admit(key, 1, 11)


async def test_unlimited_key_never_asks_redis(redis: RedisCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "run_script", None)
    lease = await RateLimiter(redis, GatewayMetrics()).admit(Principal("k", "acme"), 100, 10**9)
    assert lease.headers == {}
    lease.release(5)


async def test_reads_count_by_what_they_read_and_apart_from_requests(limiter: RateLimiter, clock: Clock) -> None:
    metrics = limiter._metrics
    principal = Principal(f"key_{secrets.token_hex(8)}", "acme", requests_per_minute=1, reads_per_minute=10)
    (await limiter.admit_read(principal)).release(1)
    # Its size is known when it has been read, so one read may go beyond the limit.
    (await limiter.admit_read(principal)).release(64)
    await limiter.state()
    clock.now += 20
    with pytest.raises(ApiError, match=r"10 reads of stored data per minute \(one for each 64 kB") as refusal:
        await limiter.admit_read(principal)
    assert (refusal.value.status, refusal.value.code, refusal.value.type) == (429, "rate_limit_exceeded", "requests")
    assert refusal.value.retry_after_s == pytest.approx(WINDOW_S - 20, abs=0.01)
    assert (refusal.value.headers, metrics.limited["reads"], metrics.limited["tokens"]) == ({}, 1, 0)
    assert await limiter.admit(principal, 1, 100)
    clock.now += WINDOW_S - 20
    assert (await limiter.admit_read(principal)).headers == {}


async def test_largest_limits_are_counted(limiter: RateLimiter) -> None:
    principal = dataclasses.replace(limited(MAX_LIMIT, MAX_LIMIT, MAX_LIMIT), reads_per_minute=MAX_LIMIT)
    headers = (await limiter.admit(principal, 1, 100)).headers
    assert headers["x-ratelimit-remaining-requests"] == str(MAX_LIMIT - 1)
    assert headers["x-ratelimit-remaining-tokens"] == str(MAX_LIMIT - 100)
    (await limiter.admit_read(principal)).release(5)
    assert await limiter.state()


async def test_headers_tell_limits_remaining_and_reset(limiter: RateLimiter, clock: Clock) -> None:
    principal = limited(requests=2, tokens=1000)
    await limiter.admit(principal, 1, 100)
    clock.now += 10
    lease = await limiter.admit(principal, 1, 50)
    assert lease.headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "850",
        "x-ratelimit-reset-tokens": "60.000s",
    }
    clock.now += 10
    error = await refused(limiter, principal)
    assert error.retry_after_s == pytest.approx(40)
    assert dict(error.response_headers())[b"retry-after"] == b"40"
    assert error.headers["x-ratelimit-remaining-requests"] == "0"


async def test_refusal_by_tokens_names_what_was_reserved_what_is_left_and_what_fits(redis: RedisCache) -> None:
    limiter = RateLimiter(redis, GatewayMetrics(), Clock(NOW))
    principal = limited(tokens=100)
    await limiter.admit(principal, 1, 70)
    # Ten of the prompt, and twenty for each of two answers.
    message = (await refused(limiter, principal, tokens=50, output=Output(2, 20))).message
    assert "reserves 50 tokens" in message
    assert "30 are left: with 'max_tokens' of at most 10 it would fit now" in message
    await limiter.admit(principal, 1, 10 + 2 * 9, Output(2, 9))
    message = (await refused(limiter, principal, tokens=50, output=Output(2, 20))).message
    assert "2 are left. Try" in message
    await limiter.admit(principal, 1, 2)
    assert "0 are left. Try" in (await refused(limiter, principal, tokens=50, output=Output(2, 20))).message
    message = (await refused(limiter, principal, tokens=210, output=Output(2, 100))).message
    assert "Lower 'max_tokens' to 45 or less." in message
    assert "Shorten the prompt." in (await refused(limiter, principal, tokens=210, output=Output(2, 50))).message


@pytest.mark.parametrize(("sequences", "tokens", "param"), [(1, 101, "max_tokens"), (5, 1, "n")])
async def test_request_that_could_never_be_admitted_is_a_400(sequences: int, tokens: int, param: str) -> None:
    limiter = RateLimiter(None, GatewayMetrics())
    error = await refused(limiter, limited(tokens=100, concurrent=4), sequences, tokens)
    assert (error.status, error.param, error.code) == (400, param, "request_too_large")


def test_reservation_is_the_prompts_once_and_the_output_of_each_choice() -> None:
    bounded = parse_completion(b'{"model":"m","prompt":[[1,2,3],[4]],"n":2,"max_tokens":10}')
    assert reserved_tokens(bounded)[0] == 4 + 4 * 10


@pytest.mark.parametrize(
    "reply",
    [
        b"OK",
        7,
        [],
        [7],
        [b"done"],
        [b"tokens"],
        [b"nonsense", *[0] * 7],
        [b"", *[b"x"] * 7],
        [b"", *[0] * 6],
        [b"", *[0] * 8],
        [[], *[0] * 7],
        [None] * 8,
    ],
    ids=repr,
)
async def test_reply_that_no_script_of_ours_makes_leaves_the_gateway_with_its_own_limit(
    redis: RedisCache, monkeypatch: pytest.MonkeyPatch, reply: object
) -> None:
    async def lie(*arguments: object) -> object:
        return reply

    monkeypatch.setattr(redis, "run_script", lie)
    limiter = RateLimiter(redis, GatewayMetrics(), Clock(NOW))
    principal = limited(requests=1, concurrent=1)
    lease = await limiter.admit(principal, 1, 0)
    assert (await refused(limiter, principal)).status == 429
    lease.release()
    assert await limiter.state() is (reply == [b"done"])


async def test_statement_that_redis_had_after_a_later_one_is_made_again(
    redis: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script, replies = redis.run_script, [[b"stale"]]

    async def late_at_first(*arguments: Any) -> object:
        return replies.pop() if replies else await run_script(*arguments)

    monkeypatch.setattr(redis, "run_script", late_at_first)
    principal = limited(requests=1)
    await RateLimiter(redis, GatewayMetrics()).admit(principal, 1, 0)
    # Redis counts it: another gateway refuses the next.
    await refused(RateLimiter(redis, GatewayMetrics()), principal)


class Stated:
    """A limiter at a time of the test's choice."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.stated: list[str] = []
        self.confirms = True
        self.limiter = RateLimiter(None, GatewayMetrics(), lambda: self.now)
        self.limiter._store = cast("Any", SimpleNamespace(state=self._state))

    async def _state(self, key_id: str, account: KeyAccount) -> bool:
        self.stated.append(key_id)
        return self.confirms

    def account(self, key_id: str, *, running: int, is_counted: bool = True, is_dirty: bool = False) -> KeyAccount:
        """Make the account of a key that was stated just now."""
        account = self.limiter._accounts[key_id]
        account.is_counted, account.is_dirty, account.stated_at = is_counted, is_dirty, self.now
        account.usage.running = running
        for number in range(running):
            account.holds.begin(number, self.now, 1)
        return account

    async def states(self, after_s: float) -> list[str]:
        """Return which keys are stated so long after the last statement."""
        self.stated = []
        self.now = 1_000.0 + after_s
        await self.limiter.state()
        return self.stated


@pytest.fixture
async def stated() -> Stated:
    return Stated()


async def test_what_runs_is_stated_again_when_half_of_the_time_is_over(stated: Stated) -> None:
    stated.account("running", running=2)
    stated.account("unlimited", running=2, is_counted=False)
    stated.account("idle", running=0).usage.record(stated.now, 1, 0)
    assert await stated.states(RENEW_S / 2 - 0.001) == []
    assert await stated.states(RENEW_S / 2) == ["running"]


async def test_what_has_changed_is_stated_at_once_and_until_it_is_confirmed(stated: Stated) -> None:
    stated.account("changed", running=1, is_counted=False, is_dirty=True)
    stated.account("same", running=1)
    stated.confirms = False
    assert not await stated.limiter.state()
    assert stated.stated == ["changed"]
    stated.confirms = True
    assert await stated.limiter.state()
    assert stated.stated == ["changed"] * 2


async def test_accounts_of_which_nothing_is_left_are_forgotten(stated: Stated) -> None:
    stated.account("idle", running=0)
    stated.account("running", running=1)
    used = stated.account("used", running=0)
    used.usage.record(stated.now, 1, 0)
    await stated.states(0.1)
    assert set(stated.limiter._accounts) == {"running", "used"}
    await stated.states(60.0)
    assert set(stated.limiter._accounts) == {"running"}


async def test_gateway_without_redis_has_nothing_to_tell(stated: Stated) -> None:
    account = stated.account("changed", running=1, is_dirty=True)
    stated.limiter._store = None
    assert await stated.limiter.state()
    assert (account.is_dirty, stated.stated) == (False, [])
