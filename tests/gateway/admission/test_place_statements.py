"""What Redis is told and asked of a place, by the milliseconds of Unix time; Redis is in memory."""

from __future__ import annotations

from dataclasses import astuple
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.admission.drain_calendar import HORIZON_S
from gateway.admission.reservations import GRACE_S, Reservation
from gateway.admission.shared_places import MAX_PENDING, SharedPlaces
from tests.gateway.admission.test_shared_places import caller

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
