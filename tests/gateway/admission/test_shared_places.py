"""Promises over several gateways that share a Redis: a client may return to any of them, once."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from gateway.admission.caller import Caller
from gateway.admission.drain_calendar import HORIZON_S
from gateway.admission.reservations import GRACE_S, Reservation
from gateway.admission.shared_places import MAX_PENDING, SharedPlaces
from gateway.admission.shedding import Shedder
from gateway.cache.redis_client import RedisCache
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.metrics import GatewayMetrics
from tests.gateway.admission.test_shedding import CONFIG, IDLE, generation
from tests.gateway.wire_worker import until

WANTED = generation(1000)
FULL = replace(IDLE, queued_requests=5, queued_tokens=25_000, num_gateways=2)
# Room for one, which is kept for those who were promised it.
NEARLY_FULL = replace(FULL, queued_tokens=9_000)


class Gateways:
    """Two shedders with one clock and one Redis."""

    def __init__(self, redis: RedisCache, model: str) -> None:
        self.now = 1000.0
        self.redis = redis
        self.full, self.nearly = (replace(load, model=model) for load in (FULL, NEARLY_FULL))
        self.places = [SharedPlaces(redis, lambda: self.now, lambda: self.now + 1.7e9) for _ in range(2)]
        self.metrics = [GatewayMetrics() for _ in range(2)]
        self.shedders = [
            Shedder(CONFIG, metrics, clock=lambda: self.now, places=places)
            for metrics, places in zip(self.metrics, self.places, strict=True)
        ]

    async def ask(self, which: int, load: FleetLoad, caller: Caller) -> ApiError | None:
        shedder = self.shedders[which]
        await shedder.recall(load, WANTED, caller)
        try:
            shedder.admit(load, WANTED, caller)
        except ApiError as error:
            await until(lambda: not self.places[which]._tasks)
            return error
        await until(lambda: not self.places[which]._tasks)
        return None

    async def both_refuse_another(self) -> None:
        for which in range(2):
            assert await self.ask(which, self.full, caller(f"somebody else {which}")) is not None


def caller(body: str, key_id: str = "key", **headers: str) -> Caller:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Caller(key_id, key_id, raw, body.encode())


@pytest.fixture
async def gateways(redis_url: str) -> AsyncIterator[Gateways]:
    redis = RedisCache(redis_url, 1.0, GatewayMetrics())
    await redis.start()
    yield Gateways(redis, f"m-{secrets.token_hex(4)}")
    await redis.close()


async def told(gateways: Gateways, who: Caller) -> float:
    await gateways.both_refuse_another()
    error = await gateways.ask(0, gateways.full, who)
    assert error is not None
    assert error.headers["x-headrace-place"] == "booked"
    assert error.retry_after_s is not None
    return error.retry_after_s


@pytest.mark.parametrize("which", [0, 1])
async def test_client_that_returns_here_or_to_another_gateway_is_admitted_once(gateways: Gateways, which: int) -> None:
    wait_s = await told(gateways, caller("mine"))
    gateways.now += wait_s
    late = replace(gateways.nearly, queued_tokens=12_000)
    assert await gateways.ask(1, late, caller("not mine")) is not None
    assert await gateways.ask(which, late, caller("mine")) is None
    assert gateways.metrics[which].promises["kept"] == 1
    assert await gateways.ask(1, late, caller("mine")) is not None


async def test_promise_is_counted_once_wherever_it_is_kept(gateways: Gateways) -> None:
    wait_s = await told(gateways, caller("mine"))
    await told(gateways, caller("never comes back"))
    gateways.now += wait_s
    late = replace(gateways.nearly, queued_tokens=12_000)
    assert await gateways.ask(1, late, caller("mine")) is None
    gateways.now += 60 + GRACE_S
    for which in range(2):
        # Looks at what has expired.
        await gateways.ask(which, gateways.full, caller(f"later {which}"))
    total = sum((metrics.promises for metrics in gateways.metrics), start=Counter())
    assert total["kept"] == 1
    # That of the one who never comes back, and those of the clients that made both gateways refuse, twice.
    assert (total["unused"], total["broken"]) == (total["made"] - 1 - 2, 0)


async def test_promise_of_which_redis_says_nothing_is_unused(gateways: Gateways) -> None:
    await told(gateways, caller("mine"))
    await gateways.redis.close()
    gateways.now += 60 + GRACE_S
    await gateways.ask(0, gateways.full, caller("later"))
    metrics = gateways.metrics[0].promises
    assert (metrics["unused"], metrics["kept"]) == (metrics["made"] - 1, 0)


async def test_early_retry_elsewhere_keeps_its_place_and_its_time(gateways: Gateways) -> None:
    wait_s = await told(gateways, caller("mine"))
    gateways.now += 5
    error = await gateways.ask(1, gateways.full, caller("mine", x_stainless_retry_count="1"))
    assert error is not None
    assert error.retry_after_s == pytest.approx(wait_s - 5, abs=1)


async def test_another_key_or_a_first_attempt_or_a_late_one_finds_nothing(gateways: Gateways) -> None:
    wait_s = await told(gateways, caller("mine"))
    gateways.now += wait_s
    late = replace(gateways.nearly, queued_tokens=12_000)
    assert await gateways.ask(1, late, caller("mine", "thief")) is not None
    assert await gateways.ask(1, late, caller("mine", x_stainless_retry_count="0")) is not None
    gateways.now += GRACE_S + 1
    assert await gateways.ask(1, late, caller("mine")) is not None


async def test_first_attempt_leaves_the_place_for_whom_it_is_kept(gateways: Gateways) -> None:
    wait_s = await told(gateways, caller("mine"))
    gateways.now += wait_s
    late = replace(gateways.nearly, queued_tokens=12_000)
    assert await gateways.ask(1, late, caller("mine", x_stainless_retry_count="0")) is not None
    assert await gateways.places[0].take(gateways.full.model, caller("mine")) is not None


async def test_two_who_come_at_once_do_not_get_one_place_both(gateways: Gateways) -> None:
    wait_s = await told(gateways, caller("mine"))
    gateways.now += wait_s
    found = await asyncio.gather(*(places.take(gateways.full.model, caller("mine")) for places in gateways.places * 3))
    assert sum(reservation is not None for reservation in found) == 1


async def test_alone_or_without_redis_nothing_is_asked(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways.redis, "run_script", None)
    alone = replace(gateways.full, num_gateways=1)
    for body in ("a", "b", "a"):
        assert await gateways.ask(0, alone, caller(body)) is not None
    await gateways.redis.close()
    for body in ("a", "b", "a"):
        assert not gateways.places[1]._tasks
        shedder = Shedder(CONFIG, GatewayMetrics(), clock=lambda: gateways.now)
        await shedder.recall(gateways.full, WANTED, caller(body))


@pytest.mark.parametrize(
    "reply",
    [
        7,
        [b"x"],
        b"\xc1",
        b"\x91\xa1\xff",
        msgspec.msgpack.encode(("t", "key", (1, 1), math.nan, 1e9, 1e9, True)),
        msgspec.msgpack.encode(("t", "key", (1, 1), -1.0, 1e9, 1e9, True)),
        msgspec.msgpack.encode(("t", "key", (1, 1), 1.0, 1e9, math.inf, True)),
        b"\x98" + msgspec.msgpack.encode(("t", "key", (1, 1), 1.0, 1e9, 1e9, True))[1:] + b"\x91" * 10_000,
    ],
    ids=["number", "list", "junk", "no-text", "nan", "negative", "endless", "nested"],
)
async def test_reply_of_redis_that_is_no_place_is_none(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch, reply: object
) -> None:
    async def run_script(*arguments: object) -> object:
        return reply

    monkeypatch.setattr(gateways.redis, "run_script", run_script)
    assert await gateways.places[0].take(gateways.full.model, caller("mine")) is None


RESERVATION = Reservation("t", "key", "key", b"\x01\x02", (2, 30), 1.5, 90.0, 112.25, True, promised_wait_s=7.5)


class Asked:
    """Places over a Redis that notes what it is asked; monotonic 100 s is 5,000 s of Unix time."""

    def __init__(self, reply: object = None) -> None:
        self.calls: list[tuple[list[str], list[Any]]] = []
        self.reply = reply
        self.redis = SimpleNamespace(is_available=True, run_script=self._run)
        self.places = SharedPlaces(cast("Any", self.redis), lambda: 100.0, lambda: 5_000.0)

    async def _run(self, script: object, keys: list[str], arguments: list[Any]) -> object:
        self.calls.append((keys, arguments))
        return self.reply


async def test_offer_says_when_its_client_returns_and_is_kept_for_as_long() -> None:
    asked = Asked()
    member = asked.places.offer("m", RESERVATION)
    await asked.places._tasks.wait()
    ((keys, arguments),) = asked.calls
    assert arguments == [5_012_250, member, (HORIZON_S + 600) * 1000]
    assert msgspec.msgpack.decode(member) == ["t", "key", [2, 30], 1.5, 4_990.0, 5_012.25, True, 7.5]
    asked.places.withdraw("m", RESERVATION, member)
    await asked.places._tasks.wait()
    assert asked.calls[1] == (keys, [member])
    assert keys[0].startswith("hr:place:")
    assert keys[0].endswith(":0102")


# A gateway of an earlier version does not say what was told; what is said is never more than can be.
@pytest.mark.parametrize(("said", "wait_s"), [((), 0.0), ((7.5,), 7.5), ((1e6,), HORIZON_S)])
async def test_place_that_is_found_is_one_by_this_gateways_clock(said: tuple[float, ...], wait_s: float) -> None:
    asked = Asked(msgspec.msgpack.encode(("t", "key", (2, 30), 1.5, 4_990.0, 5_012.25, True, *said)))
    who = caller("body")
    found = await asked.places.take("m", who)
    assert found is not None
    expected = Reservation("t", "key", "key", who.identity, (2, 30), 1.5, 90.0, 112.25, True, promised_wait_s=wait_s)
    assert astuple(found) == astuple(expected)
    # Before when places are forgotten, and between which times one is taken: a client that says so may be early.
    assert asked.calls[0][1] == [5_000_000 - 600_000, 5_000_000 - GRACE_S * 1000, 5_000_000]
    assert await asked.places.take("m", caller("body", x_stainless_retry_count="1")) is not None
    assert asked.calls[1][1][2] == "+inf"
    assert await asked.places.take("m", caller("body", "other key")) is None


async def test_nothing_is_sent_where_redis_is_away_or_too_slow() -> None:
    asked = Asked()
    asked.redis.is_available = False
    asked.places.offer("m", RESERVATION)
    assert len(asked.places._tasks) == 0
    asked.redis.is_available = True
    for _ in range(MAX_PENDING + 1):
        asked.places.withdraw("m", RESERVATION, b"")
    assert len(asked.places._tasks) == MAX_PENDING
    await asked.places._tasks.wait()
