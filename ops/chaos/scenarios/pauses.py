"""Processes that stand still and come back, and a wall clock that jumps: nothing is dead, and nothing may be lost."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ops.chaos import aftermath
from ops.chaos.disturbance import Disturbance
from ops.chaos.faults import Fault, Freeze
from ops.chaos.load import Load
from ops.chaos.mix import mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.system import System, SystemOptions
from ops.chaos.wall_clock import HOUR_S, Jump, WallClock

# NATS gives a client up after three pings of two seconds.
FROZEN_S = 12.0
WAKING_S = 5.0
RECOVERY_S = 1.0
NUM_FREEZES = 12
SHORTEST_S, LONGEST_S = 0.3, 2.0
# Between two freezes: less than it takes to notice anything, and time for a few steps.
_PAUSES_S = (0.1, 0.3, 0.7)
# Of NATS and gateway-0: when each stands still, in seconds after the beginning of a round, and for how long. The
# gateway's pause lies before that of NATS, reaches into it, lies within or around it, reaches out of it, lies after it.
_ROUNDS = (
    ((0.6, 1.2), (0.0, 0.5)),
    ((0.4, 1.2), (0.0, 0.9)),
    ((0.0, 2.0), (0.6, 0.8)),
    ((0.4, 0.8), (0.0, 1.8)),
    ((0.0, 1.2), (0.8, 1.0)),
    ((0.0, 1.2), (1.3, 0.6)),
)
_ROUND_S = 2.6
_OPTIONS = SystemOptions(num_gateways=2, num_workers=2)


def _burst(chance: random.Random) -> Sequence[Fault]:
    schedule, at_s = [], 0.0
    for _ in range(NUM_FREEZES):
        for_s = round(chance.uniform(SHORTEST_S, LONGEST_S), 2)
        schedule.append(Freeze(at_s, for_s, ("nats",)))
        at_s += for_s + chance.choice(_PAUSES_S)
    return schedule


def _nats_and_gateway() -> Sequence[Fault]:
    """Return two rounds of each kind."""
    return [
        Freeze(number * _ROUND_S + at_s, for_s, (part,))
        for number, spans in enumerate(_ROUNDS * 2)
        for part, (at_s, for_s) in zip(("nats", "gateway-0"), spans, strict=True)
    ]


_pause = partial(Disturbance, options=_OPTIONS, bodies=(*plain_bodies(700, 6), *mixed_bodies(60, 8)), concurrency=14)
# A worker that is declared dead here is a false alarm.
_freezes = partial(
    _pause,
    promise=f"0 failed, p99 <= {LONGEST_S + RECOVERY_S:g} s",
    max_silence_p99_s=LONGEST_S + RECOVERY_S,
    max_recovery_p99_s=RECOVERY_S,
    false_alarm=" is dead: ",
)

PAUSES = (
    # NATS stands still three times, for two seconds each, under long streams.
    _pause(
        "nats-freezes",
        "0 failed, pause + 1 s",
        schedule=lambda n: [Freeze(at, 2.0, ("nats",)) for at in (1.0, 5.0, 9.0)],
        max_silence_p99_s=3.0,
    ),
    # NATS stands still again and again, with hardly any time between.
    _freezes("nats-freeze-burst", schedule=lambda n: _burst(random.Random(11))),
    # NATS and a gateway stand still, their times overlapping in every way.
    _freezes("nats-and-gateway-freezes", schedule=lambda n: _nats_and_gateway()),
    # The host stands still for seven seconds: every process at once.
    _pause(
        "pause-of-everything",
        "0 failed, pause + 1 s",
        schedule=lambda n: [Freeze(1.0, 7.0, ("gateway-0", "gateway-1", "worker-0", "worker-1", "nats", "redis"))],
        max_silence_p99_s=8.0,
    ),
    _pause("pause-of-workers", "0 failed", schedule=lambda n: [Freeze(1.0, 7.0, ("worker-0", "worker-1"))]),
    _pause(
        "pause-of-gateways",
        "0 failed",
        schedule=lambda n: [Freeze(1.0, 7.0, ("gateway-0", "gateway-1"))],
        max_silence_p99_s=8.5,
    ),
)


async def gateway_frozen(num_requests: int | None) -> Outcome:
    """A gateway stands still until NATS gives it up; requests that come meanwhile are answered when it wakes up."""
    outcome = Outcome("gateway-frozen", f"0 refused, {WAKING_S:g} s after it wakes up")
    async with System(SystemOptions(num_workers=2)) as system:
        load = Load(system, plain_bodies(30, 4))
        await load.learn_references()
        gateway = system.gateways[0]
        gateway.freeze()
        asking = asyncio.create_task(load.run_open(5.0, FROZEN_S + 1.0))
        await asyncio.sleep(FROZEN_S)
        gateway.thaw()
        woken_at = time.monotonic()
        await asking
        outcome.count(load.ledger, [])
        outcome.expect(outcome.num_refused == 0, f"{outcome.num_refused} requests were refused")
        late_s = max((entry.ended_at or math.inf) - max(entry.sent_at, woken_at) for entry in load.ledger.entries)
        outcome.figures["last answer after s"] = round(late_s, 2)
        outcome.expect(late_s <= WAKING_S, f"an answer took {late_s:.1f} s after the gateway had woken up")
        await aftermath.check(system, load, outcome)
    return outcome


async def clock_jump(num_requests: int | None) -> Outcome:
    """The wall clock of gateways and workers jumps an hour forward and back, then an hour back and forward."""
    with tempfile.TemporaryDirectory() as directory:
        clock = WallClock(Path(directory))
        jumps = Disturbance(
            "clock-jump",
            "0 failed, no silence",
            SystemOptions(num_workers=2, environ=clock.environ),
            mixed_bodies(50),
            lambda n: [Jump(1.0, 1.5, clock, HOUR_S if n % 2 == 0 else -HOUR_S)],
            num_requests=600,
            max_silence_p99_s=1.5,
        )
        return await jumps(num_requests)
