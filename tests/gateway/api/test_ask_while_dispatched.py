"""A short prompt on an idle fleet is dispatched while Redis is asked; the first to answer does so, and once."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec
import pytest

from gateway.admission.caller import Caller
from gateway.api.generation_starter import MAX_SPECULATIVE_TOKENS, Membership
from gateway.cache.prompt_cache import PromptCache, cache_key
from gateway.cache.redis_client import RedisCache
from gateway.errors import ApiError
from gateway.generation import Generation, Prompt
from shared.messages import Delta, Finish, Usage
from shared.sampling import Sampling
from tests.gateway.api.test_generation_starter import Gateway as Starting
from tests.gateway.dispatch_bench import ListSink

CALLER = Caller("key", "tenant", [], b"")
CACHED = [Delta("", 0, 0, (5,), "cached", Finish("stop", Usage(7, 1, 0)))]
CLAIM = Delta("r", 0, 0, prompt_tokens=7)
LIVE = Delta("r", 0, 0, (5,), "live", Finish("stop", Usage(7, 1, 0)))


class SlowRedis:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self.num_asked = 0
        self.stored: list[bytes] = []

    async def get(self, key: str) -> bytes | None:
        self.num_asked += 1
        return await asyncio.shield(self.answer)

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        self.stored.append(value)


class Gateway(Starting):
    """A starter between a queue and a Redis that are in memory."""

    def __init__(self) -> None:
        self.redis, self.client = SlowRedis(), ListSink()
        super().__init__(PromptCache(cast("RedisCache", self.redis), 60, 10_000, 10_000))

    def generation(self, estimated_tokens: int = 7) -> Generation:
        prompt = Prompt(estimated_tokens, text="def")
        return Generation("completion", "m", (prompt,), 1, Sampling(temperature=0.0), deterministic=True)

    async def begin(self, estimated_tokens: int = 7) -> asyncio.Task[Membership]:
        """Start a request and let it come as far as it can without Redis."""
        start = self.starter.start(self.generation(estimated_tokens), self.load, CALLER, [self.client], False)
        task = asyncio.create_task(start)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    @property
    def num_dispatched(self) -> int:
        return len(self.queue.flights)

    def deliver(self, delta: Delta) -> None:
        for flight in self.queue.flights:
            flight.sink.deliver(delta)

    def cached_answer(self) -> bytes:
        """Return what another gateway has put into Redis."""
        key = cache_key("tenant", self.generation(), self.load.revisions)
        return msgspec.msgpack.encode([4, "tenant", key.digest, [CACHED], 4e9])


@pytest.fixture
async def gateway() -> Gateway:
    return Gateway()


async def test_short_prompt_on_an_idle_fleet_is_dispatched_before_redis_answers(gateway: Gateway) -> None:
    task = await gateway.begin()
    assert (gateway.num_dispatched, gateway.redis.num_asked) == (1, 1)
    gateway.redis.answer.set_result(None)
    assert (await task).prediction is not None
    gateway.deliver(LIVE)
    assert (gateway.client.text, gateway.metrics.cache_misses, gateway.metrics.cache_hits) == ("live", 1, 0)


async def test_answer_of_redis_takes_the_place_of_a_generation_that_has_not_begun(gateway: Gateway) -> None:
    task = await gateway.begin()
    gateway.redis.answer.set_result(gateway.cached_answer())
    membership = await task
    assert (gateway.client.text, gateway.num_dispatched) == ("cached", 0)
    assert (membership.prediction, gateway.metrics.cache_misses, gateway.metrics.cache_hits) == (None, 0, 1)
    await asyncio.sleep(0)
    assert gateway.redis.stored == []  # its time to live is what the first gateway gave it


@pytest.mark.parametrize("first", [CLAIM, LIVE])
async def test_generation_that_has_begun_is_not_replaced(gateway: Gateway, first: Delta) -> None:
    task = await gateway.begin()
    gateway.deliver(first)
    gateway.redis.answer.set_result(gateway.cached_answer())
    await task
    if first is CLAIM:
        gateway.deliver(LIVE)
    assert gateway.client.text == "live"
    assert (gateway.metrics.cache_misses, gateway.metrics.cache_hits) == (1, 0)


async def test_generation_that_failed_before_redis_answered_stays_failed(gateway: Gateway) -> None:
    task = await gateway.begin()
    for flight in gateway.queue.flights:
        flight.sink.fail(ApiError(503, "The queue is full."))
    gateway.redis.answer.set_result(gateway.cached_answer())
    await task
    assert (gateway.client.text, gateway.client.refusal, gateway.client.endings) == ("", (503, None), 1)


async def test_request_that_is_given_up_while_redis_is_asked_leaves_nothing_behind(gateway: Gateway) -> None:
    task = await gateway.begin()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gateway.num_dispatched == 0


@pytest.mark.parametrize("busy", [{"running": 1}, {"waiting": 1, "waiting_tokens": 5}])
async def test_busy_fleet_gets_only_what_redis_does_not_know(gateway: Gateway, busy: dict[str, int]) -> None:
    gateway.hear(**busy)
    task = await gateway.begin()
    assert (gateway.num_dispatched, gateway.redis.num_asked) == (0, 1)
    gateway.redis.answer.set_result(None)
    await task
    assert gateway.num_dispatched == 1


async def test_long_prompt_waits_for_redis(gateway: Gateway) -> None:
    await gateway.begin(MAX_SPECULATIVE_TOKENS + 1)
    assert (gateway.num_dispatched, gateway.redis.num_asked) == (0, 1)
    gateway.redis.answer.set_result(None)


async def test_answer_in_memory_costs_neither_redis_nor_a_worker_anything(gateway: Gateway) -> None:
    gateway.redis.answer.set_result(gateway.cached_answer())
    await (await gateway.begin())
    gateway.client.deltas.clear()
    await (await gateway.begin())
    assert (gateway.client.text, gateway.redis.num_asked, gateway.num_dispatched) == ("cached", 1, 0)
