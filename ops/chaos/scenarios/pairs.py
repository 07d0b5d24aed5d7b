"""Two faults at once: each pair meets requests of all kinds, and the next begins when everything is whole again."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ops.chaos import aftermath
from ops.chaos.fault_proxy import LinkState
from ops.chaos.faults import Drain, Fault, FaultLog, Freeze, Kill, Sever, Squeeze
from ops.chaos.load import Load
from ops.chaos.mix import constrained_bodies, mixed_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.system import System, SystemOptions
from ops.chaos.wall_clock import HOUR_S, Jump, WallClock

NUM_WORKERS = 3
_NUM_TOKENS = 120
_CONCURRENCY = 24
_PAUSE_S = 1.5


async def pairs(num_requests: int | None) -> Outcome:
    """Each pair once, and all of them again until `num_requests` have been asked."""
    outcome = Outcome("two-faults", "0 failed")
    with tempfile.TemporaryDirectory() as directory:
        clock = WallClock(Path(directory))
        options = SystemOptions(num_gateways=2, num_workers=NUM_WORKERS, has_faulty_links=True, environ=clock.environ)
        async with System(options) as system:
            load = Load(system, [*mixed_bodies(_NUM_TOKENS), *constrained_bodies(_NUM_TOKENS)])
            await load.learn_references()
            log = FaultLog()
            outcome.figures["pairs"] = 0
            async with load.going_on(_CONCURRENCY):
                while not log.windows or len(load.ledger.entries) < (num_requests or 0):
                    for pair in _pairs(clock):
                        await log.run(system, pair)
                        outcome.figures["pairs"] += 1
                        await asyncio.sleep(_PAUSE_S)
            outcome.count(load.ledger, log.windows)
            await aftermath.check(system, load, outcome, queue_timeout_s=aftermath.DEAD_GATEWAY_TIMEOUT_S)
    return outcome


def _pairs(clock: WallClock) -> Sequence[Sequence[Fault]]:
    workers = [f"worker-{index}" for index in range(NUM_WORKERS)]
    return [
        # A worker dies while NATS is away, just before that, and just after.
        [Kill(0.0, 0.5, "nats"), Kill(0.2, 1.0, workers[0])],
        [Kill(0.1, 0.5, "nats"), Kill(0.0, 1.0, workers[1])],
        [Kill(0.0, 0.5, "nats"), Kill(0.7, 1.0, workers[2])],
        # The worker that goes on with the work of a dead or frozen one dies, too.
        [Kill(0.0, 3.0, workers[0]), Kill(0.7, 2.0, workers[1])],
        [Freeze(0.0, 4.0, (workers[0],)), Kill(0.7, 2.0, workers[1])],
        [Squeeze(0.0, 2.0, workers[2]), Drain(0.3, 0.2, workers[0])],
        [Drain(0.0, 0.2, workers[1]), Freeze(0.1, 1.5, ("nats",))],
        # A gateway ends while workers cannot be asked to stop its work, or while its places cannot be given back.
        [Kill(0.0, 1.0, "gateway-1"), Freeze(0.0, 3.0, ("redis",))],
        [Kill(0.0, 1.0, "gateway-0"), Kill(0.0, 0.5, "nats")],
        [Drain(0.0, 0.2, "gateway-1"), Kill(0.2, 1.0, workers[0])],
        [Drain(0.0, 0.2, "gateway-0"), Freeze(0.2, 1.5, ("nats",))],
        # The clock jumps while work moves.
        [Freeze(0.0, 3.0, (workers[1],)), Jump(0.4, 2.0, clock, HOUR_S)],
        [Kill(0.0, 1.0, workers[2]), Jump(0.1, 2.0, clock, -HOUR_S)],
        [Kill(0.0, 0.5, "nats"), Jump(0.3, 2.0, clock, HOUR_S)],
        # A gateway that hears only half.
        [Sever(0.0, 3.0, LinkState.HALF_OPEN, "nats", workers[0]), Kill(0.5, 1.0, workers[1])],
        [Sever(0.0, 3.0, LinkState.MUTE, "nats", "gateway-0"), Kill(1.0, 1.0, workers[2])],
        # No worker is left.
        [Kill(0.0, 2.0, worker) for worker in workers],
        [*(Kill(0.0, 1.0, worker) for worker in workers), Kill(0.5, 0.5, "nats")],
    ]
