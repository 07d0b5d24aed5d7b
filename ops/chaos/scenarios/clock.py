"""The wall clock jumps by an hour, back and forth, in gateways and workers; whoever waits must not notice."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.chaos import disturbance
from ops.chaos.disturbance import Disturbance
from ops.chaos.faults import Fault
from ops.chaos.mix import mixed_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.system import System, SystemOptions
from ops.chaos.wall_clock import WallClock

HOUR_S = 3600


@dataclass(frozen=True)
class Jump(Fault):
    """The wall clock is wrong by an offset for `for_s`."""

    clock: WallClock
    offset_s: int

    async def run(self, system: System) -> None:
        """Change the clock, and change it back."""
        self.clock.jump(self.offset_s)
        await asyncio.sleep(self.for_s)
        self.clock.jump(0)


async def jumps(num_requests: int | None) -> Outcome:
    """An hour forward and back, then an hour back and forward."""
    with tempfile.TemporaryDirectory() as directory:
        clock = WallClock(Path(directory))

        def schedule(number: int) -> Sequence[Fault]:
            return [Jump(1.0, 1.5, clock, HOUR_S if number % 2 == 0 else -HOUR_S)]

        return await disturbance.run(
            Disturbance(
                "clock-jump",
                "0 failed, no silence",
                SystemOptions(num_workers=2, environ=clock.environ),
                mixed_bodies(50),
                schedule,
                num_requests=num_requests or 600,
                max_silence_p99_s=1.5,
            )
        )
