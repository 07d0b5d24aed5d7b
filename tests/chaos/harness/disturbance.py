"""The usual scenario: a mixed load, faults meanwhile, and every request accounted for afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop

from tests.chaos.harness import aftermath
from tests.chaos.harness.faults import Fault, FaultLog
from tests.chaos.harness.load import Load
from tests.chaos.harness.mix import Body
from tests.chaos.harness.outcome import Outcome, percentile
from tests.chaos.harness.system import System, SystemOptions

SETTLED_S = 1.0
MAX_S = 200.0


@dataclass(frozen=True)
class Disturbance:
    """A load and the faults that disturb it.

    Attributes:
        schedule: Faults of round number n. Rounds follow one another while there are requests left to ask.
        num_requests: How many to ask; None asks for as long as one round of the schedule lasts.
        tail_s: How long to go on asking after the last fault, when `num_requests` is None.
        queue_timeout_s: When the queues must be empty after all this.
        max_silence_p99_s: Promise about the silences of requests that were open during a fault; None promises nothing.
    """

    case: str
    promise: str
    options: SystemOptions
    bodies: Sequence[Body]
    schedule: Callable[[int], Sequence[Fault]]
    concurrency: int = 24
    num_requests: int | None = None
    tail_s: float = 2.0
    max_silence_p99_s: float | None = None
    queue_timeout_s: float = aftermath.SETTLE_TIMEOUT_S


async def run(disturbance: Disturbance) -> Outcome:
    """Start a system of its own, disturb it, and say what came of it."""
    async with System(disturbance.options) as system:
        return await run_on(system, disturbance)


def run_alone(disturbance: Disturbance) -> Outcome:
    """Do the same outside of any event loop."""
    return uvloop.run(run(disturbance))


async def run_on(system: System, disturbance: Disturbance) -> Outcome:
    """Disturb a running system, and say what came of it."""
    outcome = Outcome(disturbance.case, disturbance.promise)
    load = Load(system, disturbance.bodies)
    await load.learn_references()
    log = FaultLog()
    num_requests = disturbance.num_requests
    loading = asyncio.create_task(load.run(num_requests or 1_000_000, disturbance.concurrency))
    try:
        await asyncio.sleep(SETTLED_S)
        if num_requests is None:
            await log.run(system, disturbance.schedule(0))
            await asyncio.sleep(disturbance.tail_s)
            load.stop()
        else:
            await _disturb_until(loading, system, load, log, disturbance)
            outcome.expect(not load.num_left, f"{load.num_left} requests were not asked within {MAX_S:g} s")
        await loading
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    outcome.count(load.ledger, log.windows)
    outcome.figures["faults"] = len(log.windows)
    p99 = percentile(outcome.silences_s, 0.99)
    if disturbance.max_silence_p99_s is not None and p99 is not None:
        limit = disturbance.max_silence_p99_s
        outcome.expect(p99 <= limit, f"silences have a p99 of {p99:.2f} s, not {limit:g} s")
    await aftermath.check(system, load, outcome, queue_timeout_s=disturbance.queue_timeout_s)
    return outcome


async def _disturb_until(
    loading: asyncio.Task[None], system: System, load: Load, log: FaultLog, disturbance: Disturbance
) -> None:
    number = 0
    give_up_at = asyncio.get_running_loop().time() + MAX_S
    while not loading.done():
        if asyncio.get_running_loop().time() > give_up_at:
            load.stop()
            return
        await log.run(system, disturbance.schedule(number))
        number += 1
