"""How a starting gateway gets to know the fleet."""

from __future__ import annotations

import asyncio
import time

import nats
import pytest
from nats.aio.msg import Msg

from gateway.fleet.arrival import FULL_ROUND_S, QUIET_FLEET_S, wait_for_fleet
from gateway.fleet.fleet import Fleet, FleetLimits
from shared.errors import DependencyError
from tests.gateway.api.test_app import heartbeat


def empty_fleet() -> Fleet:
    return Fleet("g", FleetLimits(), lambda model: (0, 0))


async def test_workers_that_beat_are_all_known_afterwards(nats_url: str) -> None:
    connection = await nats.connect(nats_url)
    fleet = empty_fleet()
    clock = asyncio.get_running_loop().time
    for number, delay_s in enumerate((0.0, 0.1, 0.24)):
        beat = heartbeat(f"m{number}", worker=f"w{number}")
        asyncio.get_running_loop().call_later(delay_s, fleet.note_heartbeat, beat, clock())
    began = clock()
    await wait_for_fleet(connection, fleet)
    assert fleet.models() == ["m0", "m1", "m2"]
    assert clock() - began >= FULL_ROUND_S * 0.9
    await connection.close()


async def test_worker_that_is_late_is_waited_for(nats_url: str) -> None:
    connection = await nats.connect(nats_url)
    fleet = empty_fleet()
    loop = asyncio.get_running_loop()
    loop.call_later((FULL_ROUND_S + QUIET_FLEET_S) / 2, fleet.note_heartbeat, heartbeat("late"), loop.time())
    await wait_for_fleet(connection, fleet)
    assert fleet.models() == ["late"]
    await connection.close()


async def test_fleet_without_workers_is_waited_for_for_a_bounded_time(nats_url: str) -> None:
    connection = await nats.connect(nats_url)
    await asyncio.wait_for(wait_for_fleet(connection, empty_fleet()), QUIET_FLEET_S * 10)
    await connection.close()


@pytest.mark.slow
async def test_process_that_is_starved_still_hears_what_has_come_meanwhile(nats_url: str) -> None:
    connection = await nats.connect(nats_url)
    sender = await nats.connect(nats_url)
    fleet = empty_fleet()

    async def hear(message: Msg) -> None:
        fleet.note_heartbeat(heartbeat("m"), time.monotonic())

    await connection.subscribe("test.fleet_arrival", cb=hear)
    await connection.flush()
    await sender.publish("test.fleet_arrival", b"")
    await sender.flush()
    waiting = asyncio.create_task(wait_for_fleet(connection, fleet))
    await asyncio.sleep(0.1)
    time.sleep(QUIET_FLEET_S * 1.5)  # noqa: ASYNC251 - the event loop is to stand still
    await waiting
    assert fleet.models() == ["m"]
    await connection.close()
    await sender.close()


async def test_nats_that_is_away_is_told(nats_url: str) -> None:
    connection = await nats.connect(nats_url)
    await connection.close()
    with pytest.raises(DependencyError, match="subscriptions"):
        await wait_for_fleet(connection, empty_fleet())
