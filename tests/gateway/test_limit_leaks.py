"""Sequences at once, over gateways that share a Redis which answers late, forgets, or is asked by a gateway that dies.

Clocks stand still where a leak must not be hidden by the expiry of leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.admission.auth import Principal
from gateway.admission.limits import RENEW_S, Lease, RateLimiter
from gateway.cache.redis_client import RedisCache
from gateway.metrics import GatewayMetrics
from tests.gateway.admission.test_limits import Clock, limited, refused
from tests.gateway.wire_worker import until
from tests.servers import RedisServer


class SlowProxy:
    """Use as `async with`. Bytes from clients pass at once; each read from the server waits `delay_s()` first.

    Attributes:
        url: Where to connect instead.
        delay_s: May be changed at any time.
    """

    def __init__(self, host: str, port: int, delay_s: Callable[[], float]) -> None:
        self._target = (host, port)
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.delay_s = delay_s
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> SlowProxy:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, server_writer]
        for pump in (self._pump(reader, server_writer, False), self._pump(server_reader, writer, True)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if is_slow:
                    await asyncio.sleep(self.delay_s())
                writer.write(data)
        writer.close()


LIMIT = 20
TIMEOUT_S = 0.02
# For tests in which only some answers may come late.
LONGER_S = 0.3


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisCache]:
    async with connected(redis_url, 2.0, GatewayMetrics()) as cache:
        yield cache


@contextlib.asynccontextmanager
async def connected(url: str, timeout_s: float, metrics: GatewayMetrics) -> AsyncIterator[RedisCache]:
    cache = RedisCache(url, timeout_s, metrics)
    await cache.start()
    try:
        yield cache
    finally:
        await cache.close()


async def storm(limiter: RateLimiter, principal: Principal, chance: random.Random, num_aborts: int) -> None:
    """Admit and abort requests: some while Redis is asked, some later."""

    async def request() -> None:
        lease: Lease | None = None
        try:
            lease = await limiter.admit(principal, chance.choice([1, 1, 3]), 1)
            await asyncio.sleep(10)
        finally:
            if lease is not None:
                lease.release()

    async def aborted(delay_s: float) -> None:
        task = asyncio.create_task(request())
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for _ in range(num_aborts // 50):
        await asyncio.gather(*(aborted(chance.uniform(0, 0.04)) for _ in range(50)))


async def test_storm_of_aborts_while_redis_answers_late_leaks_no_slot(
    redis_server: RedisServer, redis: RedisCache
) -> None:
    chance = random.Random(11)
    metrics = GatewayMetrics()
    principal = limited(concurrent=LIMIT)
    # Every third answer comes later than the gateways wait; Redis has done then what it was told.
    async with (
        SlowProxy("127.0.0.1", redis_server.port, lambda: chance.choice([0.0, 0.001, 2 * TIMEOUT_S])) as proxy,
        connected(proxy.url, TIMEOUT_S, metrics) as one,
        connected(proxy.url, TIMEOUT_S, metrics) as another,
    ):
        limiters = [RateLimiter(cache, metrics, Clock()) for cache in (one, another)]
        stating = [asyncio.create_task(limiter.state_forever()) for limiter in limiters]
        await asyncio.gather(*(storm(limiter, principal, chance, 1500) for limiter in limiters))
        assert metrics.redis_failures > 20
        proxy.delay_s = lambda: 0.0
        fresh = RateLimiter(redis, metrics, Clock())

        async def all_slots_are_free() -> bool:
            try:
                lease = await fresh.admit(principal, LIMIT, 1)
            except Exception:
                return False
            lease.release()
            return await fresh.state()

        async with asyncio.timeout(20):
            while not await all_slots_are_free():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for task in stating:
            task.cancel()
        await asyncio.gather(*stating, return_exceptions=True)


async def until_stated(limiter: RateLimiter) -> None:
    """Tell Redis until it confirms: on a busy machine an answer without delay may come too late as well."""
    async with asyncio.timeout(10):
        while not await limiter.state():  # noqa: ASYNC110 - each turn asks Redis
            await asyncio.sleep(TIMEOUT_S)


async def test_release_that_redis_did_not_confirm_is_stated_again(redis_server: RedisServer, redis: RedisCache) -> None:
    principal = limited(concurrent=2)
    async with (
        SlowProxy("127.0.0.1", redis_server.port, lambda: 0.0) as proxy,
        connected(proxy.url, LONGER_S, GatewayMetrics()) as cache,
    ):
        limiter, other = RateLimiter(cache, GatewayMetrics(), Clock()), RateLimiter(redis, GatewayMetrics(), Clock())
        lease = await limiter.admit(principal, 2, 1)
        proxy.delay_s = lambda: 5 * LONGER_S
        lease.release()
        assert not await limiter.state()
        proxy.delay_s = lambda: 0.0
        await until_stated(limiter)
        await other.admit(principal, 2, 1)


async def test_released_sequences_are_never_stated_again_by_a_renewal(redis: RedisCache) -> None:
    clock = Clock()
    limiter, other = (RateLimiter(redis, GatewayMetrics(), clock) for _ in range(2))
    principal = limited(concurrent=2)
    leases = [await limiter.admit(principal, 1, 1) for _ in range(2)]
    clock.now += RENEW_S
    renewal = asyncio.create_task(limiter.state())
    account = limiter._accounts[principal.key_id]
    for _ in range(100):
        if account.num_calls:
            break
        await asyncio.sleep(0)
    assert account.num_calls == 1, "the statement of two sequences is on its way"
    for lease in leases:
        lease.release()
    assert await renewal
    assert await limiter.state()
    await other.admit(principal, 2, 1)


async def test_statement_that_arrives_late_changes_nothing(redis: RedisCache, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    limiter, other = (RateLimiter(redis, GatewayMetrics(), clock) for _ in range(2))
    principal = limited(concurrent=2, tokens=100)
    sent: list[tuple[object, ...]] = []
    evaluate = redis.run_script

    async def spy(*call: object) -> object:
        sent.append(call)
        return await evaluate(*call)  # type: ignore[arg-type]

    monkeypatch.setattr(redis, "run_script", spy)
    lease = await limiter.admit(principal, 2, 60)
    lease.release(0)
    assert await limiter.state()
    for call in sent:
        assert await evaluate(*call) == [b"stale"]  # type: ignore[arg-type]
    admitted = await other.admit(principal, 2, 100)
    assert admitted.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_correction_that_redis_confirmed_too_late_is_applied_once(
    redis_server: RedisServer, redis: RedisCache
) -> None:
    principal = limited(tokens=100)
    async with (
        SlowProxy("127.0.0.1", redis_server.port, lambda: 0.0) as proxy,
        connected(proxy.url, LONGER_S, GatewayMetrics()) as cache,
    ):
        limiter, other = RateLimiter(cache, GatewayMetrics(), Clock()), RateLimiter(redis, GatewayMetrics(), Clock())
        kept = await limiter.admit(principal, 1, 40)
        assert kept.headers["x-ratelimit-remaining-tokens"] == "60"
        lease = await limiter.admit(principal, 1, 50)
        lease.release(10)
        proxy.delay_s = lambda: 5 * LONGER_S
        assert not await limiter.state()
        proxy.delay_s = lambda: 0.0
        await until_stated(limiter)
        await until_stated(limiter)
        assert (await other.admit(principal, 1, 1)).headers["x-ratelimit-remaining-tokens"] == str(100 - 40 - 10 - 1)


async def test_redis_that_forgets_is_told_again(start_redis: Callable[..., RedisServer]) -> None:
    server = start_redis()
    clock, principal = Clock(), limited(concurrent=2)
    async with (
        connected(server.url, 0.5, GatewayMetrics()) as one,
        connected(server.url, 0.5, GatewayMetrics()) as another,
    ):
        limiter, other = (RateLimiter(cache, GatewayMetrics(), clock) for cache in (one, another))
        await limiter.admit(principal, 2, 1)
        server.kill()
        server.start()
        for cache in (one, another):
            await cache.get("x")
            await until(lambda cache=cache: cache.is_available)
        clock.now += RENEW_S
        assert await limiter.state()
        await refused(other, principal)


async def test_refused_sequences_that_a_later_question_counted_are_put_right(redis: RedisCache) -> None:
    clock = Clock()
    limiter, other = (RateLimiter(redis, GatewayMetrics(), clock) for _ in range(2))
    principal = limited(concurrent=4)
    # The third question says that the four sequences of the second may run, too; they are refused all the same.
    results = await asyncio.gather(
        *(limiter.admit(principal, sequences, 1) for sequences in (3, 4, 1)), return_exceptions=True
    )
    assert [isinstance(result, Lease) for result in results] == [True, False, False]
    assert await limiter.state()
    (await other.admit(principal, 1, 1)).release()
    for result in results:
        if isinstance(result, Lease):
            result.release()
    assert await limiter.state()
    assert await other.state()
    await other.admit(principal, 4, 1)


@pytest.mark.parametrize("shared", [False, True])
async def test_refusal_for_too_many_sequences_says_when_one_will_have_ended(redis: RedisCache, shared: bool) -> None:
    clock = Clock()
    limiter = RateLimiter(redis if shared else None, GatewayMetrics(), clock)
    principal = limited(concurrent=10)
    for _ in range(3):
        lease = await limiter.admit(principal, 10, 1)
        clock.now += 30
        lease.release()
    for _ in range(10):
        await limiter.admit(principal, 1, 1)
        clock.now += 2
    # The oldest has run for 20 of about 30 seconds; the next follows 2 seconds later.
    assert (await refused(limiter, principal)).retry_after_s == pytest.approx(10)
    assert (await refused(limiter, principal, sequences=2)).retry_after_s == pytest.approx(12)
    # From now on they are late, and end at a rate of one in three seconds.
    clock.now += 40
    error = await refused(limiter, principal)
    assert error.retry_after_s == pytest.approx(3)
    assert "Try again in 3.0 s" in error.message


@pytest.mark.parametrize("shared", [False, True])
async def test_one_short_request_changes_little_of_what_requests_usually_take(redis: RedisCache, shared: bool) -> None:
    clock = Clock()
    limiter = RateLimiter(redis if shared else None, GatewayMetrics(), clock)
    principal = limited(concurrent=1)
    for seconds in (30, 0):
        lease = await limiter.admit(principal, 1, 1)
        clock.now += seconds
        lease.release()
    await limiter.admit(principal, 1, 1)
    assert (await refused(limiter, principal)).retry_after_s == pytest.approx(24)


@pytest.mark.parametrize("num_stale", [1, 2])
async def test_statement_that_came_behind_a_later_one_is_made_once_more(
    redis: RedisCache, monkeypatch: pytest.MonkeyPatch, num_stale: int
) -> None:
    limiter, other = (RateLimiter(redis, GatewayMetrics(), Clock()) for _ in range(2))
    principal = limited(requests=1)
    evaluate, replies = redis.run_script, [[b"stale"]] * num_stale

    async def stale_at_first(*call: object) -> object:
        return replies.pop() if replies else await evaluate(*call)  # type: ignore[arg-type]

    monkeypatch.setattr(redis, "run_script", stale_at_first)
    await limiter.admit(principal, 1, 1)
    # After the second time the gateway goes by its own limit, of which Redis does not know.
    if num_stale == 1:
        await refused(other, principal)
    else:
        await other.admit(principal, 1, 1)
    await refused(limiter, principal)


async def test_another_gateways_sequences_say_when_to_return_too(redis: RedisCache) -> None:
    clock = Clock()
    busy, other = (RateLimiter(redis, GatewayMetrics(), clock) for _ in range(2))
    principal = limited(concurrent=2)
    lease = await busy.admit(principal, 2, 1)
    clock.now += 20
    lease.release()
    await busy.admit(principal, 2, 1)
    assert (await refused(other, principal)).retry_after_s == pytest.approx(10)


@pytest.mark.parametrize("shared", [False, True])
async def test_accounts_of_idle_keys_are_dropped(redis: RedisCache, shared: bool) -> None:
    clock = Clock()
    limiter = RateLimiter(redis if shared else None, GatewayMetrics(), clock)
    for _ in range(20):
        (await limiter.admit(limited(concurrent=1), 1, 1)).release()
    assert len(limiter._accounts) == 20
    clock.now += 61
    await limiter.state()
    await limiter.state()
    assert not limiter._accounts
