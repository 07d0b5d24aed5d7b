"""What must hold after the faults, without load: nothing held, nothing queued, new requests served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from nats.errors import Error as NatsError

from ops.chaos.ledger import Verdict
from ops.chaos.load import Load
from ops.chaos.outcome import Outcome
from ops.chaos.system import System

SETTLE_TIMEOUT_S = 20.0
# Requests of a dead gateway stay in the queue for so long, because a frozen one would ask again.
DEAD_GATEWAY_TIMEOUT_S = 80.0


async def check(system: System, load: Load, outcome: Outcome, *, queue_timeout_s: float = SETTLE_TIMEOUT_S) -> None:
    """Write down whatever is left over, then ask one ordinary request of each gateway."""
    for part in system.parts:
        outcome.expect(part.is_running, f"{part.name} has died:\n{part.log[-1500:]}")
    for part in [part for part in system.parts if not part.is_running]:
        part.num_exits += 1
        await part.start()
    try:
        await system.wait_ready()
    except TimeoutError:
        heard = {seen.worker for seen in system.observer.live_workers(1.0)}
        unheard = [part for part in system.workers if not any(name in part.log for name in heard)]
        outcome.problems.append(f"not all workers are heard: { {part.name: part.log[-1500:] for part in unheard} }")

    async def is_idle() -> bool:
        return not _held(system)

    async def are_queues_empty() -> bool:
        try:
            return not any((await system.observer.num_queued()).values())
        except NatsError:
            return False

    if not await _within(is_idle, SETTLE_TIMEOUT_S):
        outcome.problems.append(f"workers still hold something: {_held(system)}")
    if not await _within(are_queues_empty, queue_timeout_s):
        outcome.problems.append(f"the queues are not empty: {await system.observer.num_queued()}")
    for gateway in system.gateways:
        verdict = await load.ask_once(gateway=gateway.name)
        outcome.expect(verdict is Verdict.OK, f"an ordinary request to {gateway.name} afterwards is {verdict.value}")
    outcome.figures["client lag max s"] = round(load.max_lag_s, 2)


async def _within(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def _held(system: System) -> dict[str, str]:
    return {
        seen.worker: f"{seen.running} running, {seen.waiting} waiting, {seen.free_blocks} of {seen.total_blocks} free"
        for seen in system.observer.live_workers(1.0)
        if seen.running or seen.waiting or seen.free_blocks != seen.total_blocks
    }
