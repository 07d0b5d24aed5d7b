"""A wall clock that a scenario can move, for its own processes: a shim in C, built once, preloaded into them."""

from __future__ import annotations

import asyncio
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ops.chaos.faults import Fault
from ops.chaos.outcome import NotPossibleHereError
from ops.chaos.system import System

HOUR_S = 3600
_SOURCE = Path(__file__).with_name("clock_shim.c")


class WallClock:
    """The wall clock of the processes that are started with `environ`; the machine's own stays as it is."""

    def __init__(self, directory: Path) -> None:
        """Build the shim in `directory`.

        Raises:
            NotPossibleHereError: There is no C compiler.
        """
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise NotPossibleHereError("moving the wall clock of a process needs a C compiler")
        library = directory / "clock_shim.so"
        self._file = directory / "clock_offset"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-ldl"], check=True)
        self.jump(0)
        self.environ = {"LD_PRELOAD": str(library), "CHAOS_CLOCK_FILE": str(self._file)}

    def jump(self, offset_s: int) -> None:
        """Set the clock to the machine's time plus an offset, at once and for all processes."""
        # In place: the file stays mapped into the processes.
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", offset_s))


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
