"""One process of the system under test: started, killed, frozen, and started again on the same port.

Owns the process. Nothing restarts it but the scenario, so that what happens meanwhile can be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ops.stack.tether import tethered

START_TIMEOUT_S = 60.0
_DRAIN_TIMEOUT_S = 30.0


@dataclass
class Part:
    """A process and how to start it.

    Attributes:
        is_ready: Judges by the text that the present process has logged whether it serves.
        num_exits: How often it was found dead without the scenario having killed it.
        num_kills: How often the scenario has killed it.
        is_expected_dead: The scenario has killed it and not started it again.
    """

    name: str
    command: list[str]
    environ: dict[str, str]
    log_file: Path
    is_ready: Callable[[str], bool]
    num_exits: int = 0
    num_kills: int = 0
    is_expected_dead: bool = True
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _log_start: int = 0

    @property
    def pid(self) -> int:
        """Of the present or last process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What the present process has logged."""
        return self.log_file.read_bytes()[self._log_start :].decode(errors="replace")

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the process; 0 when it is dead."""
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            return pages * resource.getpagesize()
        return 0

    def launch(self) -> None:
        """Start the process; it dies with this one, even when this one is killed."""
        assert not self.is_running
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                tethered(self.command), env=self.environ, stdout=output, stderr=subprocess.STDOUT
            )
        self.is_expected_dead = False

    async def start(self) -> None:
        """Start the process and wait until it serves; `RuntimeError` if it ended or was not ready in time."""
        self.launch()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not self.is_ready(self.log):
                    if not self.is_running:
                        raise RuntimeError(f"{self.name} ended while it started:\n{self.log[-3000:]}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise RuntimeError(f"{self.name} was not ready within {START_TIMEOUT_S:g} s:\n{self.log[-3000:]}") from None

    def kill(self) -> None:
        """End the process at once, as a crash or the kernel out of memory would."""
        self.is_expected_dead = True
        self.num_kills += 1
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    async def terminate(self) -> None:
        """Ask the process to drain and end, and wait for that; kill it when it takes too long."""
        self.is_expected_dead = True
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while self.is_running:
            if time.monotonic() > deadline:
                self.kill()
            await asyncio.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def revive(self) -> None:
        """Start the process if it is dead, and count its death if the scenario did not kill it."""
        if not self.is_running:
            self.num_exits += not self.is_expected_dead
            await self.start()
