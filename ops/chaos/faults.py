"""Faults as values: each says what breaks, when, and for how long; a schedule is a list of them.

A fault heals itself: when its `run` returns, the system is whole again (a killed process is back, a link passes bytes).
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ops.chaos.fault_proxy import LinkState
from ops.chaos.system import System


@dataclass(frozen=True)
class Fault(ABC):
    """Something that breaks `at_s` after the schedule began, for `for_s` seconds."""

    at_s: float
    for_s: float

    @abstractmethod
    async def run(self, system: System) -> None:
        """Break it, wait, and mend it."""


@dataclass(frozen=True)
class _PartFault(Fault):
    part: str


class Kill(_PartFault):
    """SIGKILL of a process, started again after `for_s`."""

    async def run(self, system: System) -> None:
        """Kill it."""
        part = system.part(self.part)
        part.kill()
        await asyncio.sleep(self.for_s)
        await part.revive()


class Drain(_PartFault):
    """SIGTERM of a process, started again `for_s` after it has ended."""

    async def run(self, system: System) -> None:
        """Let it drain."""
        part = system.part(self.part)
        await part.terminate()
        await asyncio.sleep(self.for_s)
        await part.revive()


@dataclass(frozen=True)
class Freeze(Fault):
    """SIGSTOP of one or more processes at the same moment, SIGCONT after `for_s`."""

    parts: tuple[str, ...]

    async def run(self, system: System) -> None:
        """Stop them, all at once."""
        parts = [system.part(name) for name in self.parts]
        for part in parts:
            part.signal(signal.SIGSTOP)
        await asyncio.sleep(self.for_s)
        for part in parts:
            part.signal(signal.SIGCONT)


class Squeeze(_PartFault):
    """No memory for a process: every allocation that needs a new page from the kernel fails; killed after `for_s`."""

    async def run(self, system: System) -> None:
        """Take its memory, then kill the process if it still runs."""
        part = system.part(self.part)
        if part.is_running:
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(part.pid, resource.RLIMIT_AS)
                resource.prlimit(part.pid, resource.RLIMIT_AS, (1, hard))
        await asyncio.sleep(self.for_s)
        part.kill()
        await part.revive()


@dataclass(frozen=True)
class Sever(Fault):
    """Links of the given ends are in `state` for `for_s`; `ends` are (part, server), and None stands for all."""

    state: LinkState
    server: str
    part: str | None = None

    async def run(self, system: System) -> None:
        """Change the links."""
        assert any(self.part in (None, part) for part, _ in system.links), f"{self.part} has no link"
        await system.set_links(self.state, self.server, self.part)
        await asyncio.sleep(self.for_s)
        await system.set_links(LinkState.WHOLE, self.server, self.part)


@dataclass(frozen=True)
class Jump(Fault):
    """The wall clock of gateways and workers is wrong by an offset for `for_s`."""

    offset_s: int

    async def run(self, system: System) -> None:
        """Change the clock, and change it back."""
        assert system.clock is not None
        system.clock.jump(self.offset_s)
        await asyncio.sleep(self.for_s)
        system.clock.jump(0)


class FaultLog:
    """When faults were at work, as monotonic times."""

    def __init__(self) -> None:
        self.windows: list[tuple[float, float]] = []

    async def run(self, system: System, schedule: Sequence[Fault]) -> None:
        """Let all faults of a schedule happen, and return when the last is mended."""

        async def run_one(fault: Fault) -> None:
            await asyncio.sleep(fault.at_s)
            start = time.monotonic()
            await fault.run(system)
            self.windows.append((start, time.monotonic()))

        async with asyncio.TaskGroup() as faults:
            for fault in schedule:
                faults.create_task(run_one(fault))
