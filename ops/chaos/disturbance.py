"""The usual scenario: a mixed load, faults meanwhile, and every request accounted for afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ops.chaos import aftermath
from ops.chaos.faults import Fault, FaultLog
from ops.chaos.load import ANSWER_TIMEOUT_S, Load
from ops.chaos.mix import Body, mixed_bodies
from ops.chaos.outcome import Outcome, percentile, spread
from ops.chaos.system import System, SystemOptions

SETTLED_S = 1.0
MAX_S = 200.0
# Slower than that, a load of many requests is given up; a machine of two cores that does nothing else answers fifty.
MIN_REQUESTS_PER_S = 20.0
_OPTIONS = SystemOptions(num_gateways=2, num_workers=2)


@dataclass(frozen=True)
class Disturbance:
    """A load and the faults that disturb it.

    Called with a number of requests, it is a scenario; the number replaces `num_requests`, unless that is None.

    Attributes:
        schedule: Faults of round number n. Rounds follow one another while there are requests left to ask.
        num_requests: How many to ask; None asks for as long as one round of the schedule lasts.
        tail_s: How long to go on asking after the last fault, when `num_requests` is None.
        queue_timeout_s: When the queues must be empty after all this.
        timeout_s: A request that takes longer counts as without an end.
        max_silence_p99_s: Promise about the silences of requests that were open during a fault; None promises nothing.
        max_recovery_p99_s: Promise about the part of these silences that comes after the fault was mended, where the
            part that is broken has to be back before anything can go on.
        min_faults: With fewer faults nothing would be shown.
        false_alarm: Words that no gateway may log, because what they report does not happen.
    """

    case: str
    schedule: Callable[[int], Sequence[Fault]]
    promise: str = "0 failed"
    options: SystemOptions = _OPTIONS
    bodies: Sequence[Body] = field(default_factory=partial(mixed_bodies, 50))
    concurrency: int = 24
    num_requests: int | None = None
    tail_s: float = 2.0
    max_silence_p99_s: float | None = None
    max_recovery_p99_s: float | None = None
    queue_timeout_s: float = aftermath.SETTLE_TIMEOUT_S
    timeout_s: float = ANSWER_TIMEOUT_S
    min_faults: int = 0
    false_alarm: str | None = None

    async def __call__(self, num_requests: int | None = None) -> Outcome:
        """Start a system and run it, with another number of requests where it counts them."""
        is_counted = num_requests is not None and self.num_requests is not None
        async with System(self.options) as system:
            return await run_on(system, replace(self, num_requests=num_requests) if is_counted else self)


async def run_on(system: System, disturbance: Disturbance) -> Outcome:
    """Disturb a running system, and report what happened."""
    outcome = Outcome(disturbance.case, disturbance.promise)
    load = Load(system, disturbance.bodies, timeout_s=disturbance.timeout_s)
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
            outcome.expect(not load.num_left, f"{load.num_left} requests were not asked in time")
        await loading
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    outcome.count(load.ledger, log.windows)
    outcome.figures["faults"] = len(log.windows)
    few = f"there were {len(log.windows)} faults, not {disturbance.min_faults}: nothing was shown"
    outcome.expect(len(log.windows) >= disturbance.min_faults, few)
    _judge_silences(outcome, disturbance, load.max_lag_s)
    if (alarm := disturbance.false_alarm) is not None:
        num_alarms = outcome.figures["false alarms"] = sum(part.log.count(alarm) for part in system.gateways)
        outcome.expect(not num_alarms, f"gateways logged {alarm!r} {num_alarms} times, without a reason")
    await aftermath.check(system, load, outcome, queue_timeout_s=disturbance.queue_timeout_s)
    return outcome


def _judge_silences(outcome: Outcome, disturbance: Disturbance, lag_s: float) -> None:
    """Hold silences to the promises, but for what this process itself was late to hear."""
    limit_s, p99_s = disturbance.max_silence_p99_s, percentile(outcome.silences_s, 0.99)
    if limit_s is not None and p99_s is not None:
        outcome.expect(p99_s <= limit_s + lag_s, f"silences have a p99 of {p99_s:.2f} s, not {limit_s:g} s")
    limit_s, p99_s = disturbance.max_recovery_p99_s, percentile(outcome.recoveries_s, 0.99)
    if limit_s is not None and p99_s is not None:
        outcome.figures["silent after it was mended p50/p99/max s"] = spread(outcome.recoveries_s)
        problem = f"streams were silent for {p99_s:.2f} s (p99) after it was mended, not {limit_s:g} s"
        outcome.expect(p99_s <= limit_s + lag_s, problem)


async def _disturb_until(
    loading: asyncio.Task[None], system: System, load: Load, log: FaultLog, disturbance: Disturbance
) -> None:
    number = 0
    num_requests = disturbance.num_requests or 0
    give_up_at = asyncio.get_running_loop().time() + max(MAX_S, num_requests / MIN_REQUESTS_PER_S)
    while not loading.done():
        if asyncio.get_running_loop().time() > give_up_at:
            load.stop()
            return
        await log.run(system, disturbance.schedule(number))
        number += 1
