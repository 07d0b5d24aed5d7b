"""Whether a request could be served, and why not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from gateway.fleet.hosted_models import HostedModels
from gateway.fleet.readiness import FULL_ROUND_S, QUIET_FLEET_S, Readiness, readiness, wait_for_fleet
from shared.direct_client import DirectClient
from shared.errors import DependencyError
from shared.nats_connection import connect
from tests.gateway.api.test_app import heartbeat
from tests.gateway.fleet.test_hosted_models import new_fleet


@pytest.mark.parametrize(
    ("ready", "is_connected", "expected"),
    [
        (("a", "b"), True, Readiness("ready", ("a", "b"))),
        (("b",), True, Readiness("ready", ("b",))),
        ((), True, Readiness("no_worker", ())),
        (("a",), False, Readiness("no_queue", ("a",))),
        ((), False, Readiness("no_queue", ())),
    ],
)
def test_queue_is_looked_at_first_and_then_the_workers(
    ready: tuple[str, ...], is_connected: bool, expected: Readiness
) -> None:
    workers = {"models": lambda: ["a", "b"], "is_ready": lambda model: model in ready}
    fleet = SimpleNamespace(**workers, hosted=HostedModels())
    found = readiness(cast("Any", fleet), is_connected=is_connected)
    assert found == expected
    assert found.is_ready is (expected.status == "ready")


@pytest.fixture
async def connection(nats_url: str) -> AsyncIterator[DirectClient]:
    connection = await connect(nats_url, role="gateway", name="g")
    yield connection
    await connection.close()


async def test_workers_that_beat_are_all_known_afterwards(connection: DirectClient) -> None:
    fleet = new_fleet()
    clock = asyncio.get_running_loop().time
    for number, delay_s in enumerate((0.0, 0.1, 0.24)):
        beat = heartbeat(f"m{number}", worker=f"w{number}")
        asyncio.get_running_loop().call_later(delay_s, fleet.note_heartbeat, beat, clock())
    began = clock()
    await wait_for_fleet(connection, fleet)
    assert fleet.models() == ["m0", "m1", "m2"]
    assert clock() - began >= FULL_ROUND_S * 0.9


async def test_worker_that_is_late_is_waited_for(connection: DirectClient) -> None:
    fleet = new_fleet()
    loop = asyncio.get_running_loop()
    loop.call_later((FULL_ROUND_S + QUIET_FLEET_S) / 2, fleet.note_heartbeat, heartbeat("late"), loop.time())
    await wait_for_fleet(connection, fleet)
    assert fleet.models() == ["late"]


async def test_fleet_without_workers_is_waited_for_for_a_bounded_time(connection: DirectClient) -> None:
    await asyncio.wait_for(wait_for_fleet(connection, new_fleet()), QUIET_FLEET_S * 10)


async def test_workers_are_waited_for_from_when_nats_has_the_subscriptions() -> None:
    fleet, loop = new_fleet(), asyncio.get_running_loop()

    async def flush() -> None:
        loop.call_later(FULL_ROUND_S / 2, fleet.note_heartbeat, heartbeat("m"), loop.time())

    await wait_for_fleet(cast("Any", SimpleNamespace(flush=flush)), fleet)
    assert fleet.models() == ["m"]


async def test_process_that_is_starved_still_hears_what_has_come_meanwhile(
    connection: DirectClient, nats_url: str
) -> None:
    sender = await connect(nats_url, role="worker", name="w")
    fleet = new_fleet()

    async def hear(message: Msg) -> None:
        fleet.note_heartbeat(heartbeat("m"), time.monotonic())

    async def known_when_ready() -> list[str]:
        await wait_for_fleet(connection, fleet)
        return fleet.models()

    await connection.subscribe("test.fleet_arrival", cb=hear)
    waiting = asyncio.create_task(known_when_ready())
    await asyncio.sleep(0.1)
    assert not fleet.models()
    sender.send("test.fleet_arrival")  # written at once, and read by a process that stands still meanwhile
    time.sleep(QUIET_FLEET_S * 1.5)  # noqa: ASYNC251 - the event loop is to stand still
    assert await waiting == ["m"]
    await sender.close()


async def test_nats_that_is_away_is_told(connection: DirectClient) -> None:
    await connection.close()
    with pytest.raises(DependencyError, match="subscriptions"):
        await wait_for_fleet(connection, new_fleet())
