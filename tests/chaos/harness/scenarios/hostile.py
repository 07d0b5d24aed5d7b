"""Malformed messages on every subject and route: nobody crashes, nobody waits, and no memory is kept."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence

import nats
from nats.aio.client import Client

from tests.chaos.harness import aftermath
from tests.chaos.harness.load import Load
from tests.chaos.harness.malformed import Kind, damaged, hostile_http, kinds
from tests.chaos.harness.mix import mixed_bodies
from tests.chaos.harness.outcome import Outcome
from tests.chaos.harness.system import System, SystemOptions

ROUND_SIZE = 500
# Of so many messages one goes over HTTP: a connection costs as much as many messages.
HTTP_EVERY = 20
MAX_QUEUED = 2000
WARM_UP_SHARE = 0.25
MAX_GROWTH = 0.02
_MAX_GROWTH_BYTES = 4 << 20


async def malformed(num_requests: int | None) -> Outcome:
    """Malformed messages from everyone who may publish, and from HTTP clients, beside an ordinary load."""
    number = num_requests or 20_000
    outcome = Outcome("malformed", "0 crashes, memory +-2 %")
    async with System(SystemOptions(num_workers=2, simulate_ms=5.0)) as system:
        load = Load(system, mixed_bodies(30))
        await load.learn_references()
        clients = {role: await nats.connect(system.role_url(role)) for role in ("gateway", "worker", "batch")}
        targets = kinds(system.observer.gateways.popitem()[0], "chaos")
        loading = asyncio.create_task(load.run(1_000_000, 4))
        began = time.monotonic()
        chance = random.Random(number)
        await _send(system, clients, targets, int(number * WARM_UP_SHARE), chance)
        before = {part.name: part.rss_bytes for part in (*system.gateways, *system.workers)}
        await _send(system, clients, targets, number - int(number * WARM_UP_SHARE), chance)
        outcome.figures["messages/s"] = round(number / (time.monotonic() - began))
        load.stop()
        await loading
        outcome.count(load.ledger, [(began, time.monotonic())])
        for client in clients.values():
            await client.close()
        await aftermath.check(system, load, outcome)
        outcome.num_requests += number
        _judge_memory(system, before, outcome)
    return outcome


def _judge_memory(system: System, before: dict[str, int], outcome: Outcome) -> None:
    for part in (*system.gateways, *system.workers):
        grown = part.rss_bytes - before[part.name]
        outcome.figures[f"{part.name} grew by KB"] = grown // 1024
        # A few arenas of the allocator are no leak.
        is_kept = grown <= max(MAX_GROWTH * before[part.name], _MAX_GROWTH_BYTES)
        outcome.expect(is_kept, f"{part.name} grew by {grown / 1e6:.1f} MB of {before[part.name] / 1e6:.0f}")


async def _send(
    system: System, clients: dict[str, Client], targets: Sequence[Kind], number: int, chance: random.Random
) -> None:
    """Send so many messages, evenly over all kinds; wait where a queue is about to fill up."""
    for _ in range(0, number, ROUND_SIZE):
        num_http = ROUND_SIZE // HTTP_EVERY
        for index in range(ROUND_SIZE - num_http):
            kind = targets[index % len(targets)]
            await clients[kind.role].publish(kind.subject, damaged(kind, chance))
        for client in clients.values():
            await client.flush()
        await asyncio.gather(*(_hit(system, hostile_http(chance)) for _ in range(num_http)))
        while sum((await system.observer.num_queued()).values()) > MAX_QUEUED:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _hit(system: System, payload: bytes) -> None:
    port = system.port(system.gateways[0].name)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(payload)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 5.0)
    writer.transport.abort()
