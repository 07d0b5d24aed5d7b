"""Malformed messages on every subject and route: nobody crashes, nobody waits, and no memory is kept."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from ops.chaos import aftermath
from ops.chaos.hostile_http import send_broken_framing, send_broken_requests
from ops.chaos.load import Load
from ops.chaos.malformed import Kind, damaged, kinds
from ops.chaos.mix import mixed_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.part import free_port
from ops.chaos.system import System, SystemOptions
from shared.direct_client import DirectClient
from shared.nats_connection import Role, connect

ROUND_SIZE = 4000
# Of so many messages one is a request over HTTP, and of so many of those one breaks its connection: a connection costs
# as much as many requests on it.
HTTP_EVERY = 8
FRAMING_EVERY = 20
REQUESTS_PER_CONNECTION = 50
MAX_QUEUED = 2000
WARM_UP_SHARE = 0.25
MAX_GROWTH = 0.02
_MAX_GROWTH_BYTES = 4 << 20
_ROLES: tuple[Role, ...] = ("gateway", "worker", "batch")


async def malformed(num_requests: int | None) -> Outcome:
    """Malformed messages from everyone who may publish, and from HTTP clients, beside an ordinary load."""
    number = num_requests or 20_000
    outcome = Outcome("malformed", "0 crashes, memory +-2 %")
    operator = {"operator_port": free_port(), "operator_key": "operator-chaos-0123456789"}
    async with System(SystemOptions(num_workers=2, simulate_ms=5.0, gateway=operator)) as system:
        load = Load(system, mixed_bodies(30))
        await load.learn_references()
        attack = await _attack(system, operator["operator_port"], random.Random(number))
        loading = asyncio.create_task(load.run(1_000_000, 4))
        began = time.monotonic()
        await attack.send(int(number * WARM_UP_SHARE))
        before = {part.name: part.rss_bytes for part in (*system.gateways, *system.workers)}
        await attack.send(number - int(number * WARM_UP_SHARE))
        outcome.figures["messages/s"] = round(number / (time.monotonic() - began))
        load.stop()
        await loading
        outcome.count(load.ledger, [(began, time.monotonic())])
        await attack.close()
        attack.judge(outcome)
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


async def _attack(system: System, operator_port: object, chance: random.Random) -> _Attack:
    clients = {role: await connect(system.role_url(role), role=role, name="chaos-attack") for role in _ROLES}
    targets = kinds(system.observer.gateways.popitem()[0], system.observer.live_workers(1.0)[0].worker)
    ports = [system.port(system.gateways[0].name), int(str(operator_port))]
    return _Attack(system, clients, targets, ports, chance)


@dataclass
class _Attack:
    """Sends malformed messages, evenly over all kinds. Owns the connections and the counts of answers.

    Attributes:
        ports: Of the gateway: the public one, and the operator's.
    """

    system: System
    clients: dict[Role, DirectClient]
    targets: list[Kind]
    ports: list[int]
    chance: random.Random
    num_requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)

    async def send(self, number: int) -> None:
        """Send so many messages; wait where a queue is about to fill up."""
        for start in range(0, number, ROUND_SIZE):
            size = min(ROUND_SIZE, number - start)
            num_http = size // HTTP_EVERY
            for index in range(size - num_http):
                kind = self.targets[index % len(self.targets)]
                self.clients[kind.role].send(kind.subject, damaged(kind, self.chance))
            await asyncio.gather(*(client.flush() for client in self.clients.values()))
            await self._send_http(num_http)
            while sum((await self.system.observer.num_queued()).values()) > MAX_QUEUED:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Close the connections to NATS."""
        for client in self.clients.values():
            await client.close()

    def judge(self, outcome: Outcome) -> None:
        """Expect an answer to each request, and none that blames the server."""
        outcome.figures["HTTP answers"] = dict(sorted(self.statuses.items()))
        missing = self.num_requests - self.statuses.total()
        outcome.expect(not missing, f"{missing} of {self.num_requests} broken requests have no answer")
        blamed = {status: count for status, count in self.statuses.items() if status >= 500}
        outcome.expect(not blamed, f"broken requests were answered {blamed}")

    async def _send_http(self, number: int) -> None:
        num_connections = number // FRAMING_EVERY
        await asyncio.gather(*(send_broken_framing(self._port(), self.chance) for _ in range(num_connections)))
        num_left = number - num_connections
        while num_left:
            size = min(num_left, REQUESTS_PER_CONNECTION)
            self.statuses += await send_broken_requests(self._port(), size, self.chance)
            self.num_requests += size
            num_left -= size

    def _port(self) -> int:
        return self.ports[self.chance.random() < 0.1]
