"""One worker process of a host: started once, watched by its heartbeats, and never started again by itself."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from ops.stack import commands
from ops.stack.child import Child, ChildSpec, Exit
from ops.stack.console import Console
from ops.stack.hosting.reconcile import SeenWorker
from ops.stack.hosting.wishes import Wish
from ops.stack.liveness import WORKER_PATIENCE, Liveness
from ops.stack.process_tree import is_stopped
from shared.messages import Heartbeat
from shared.subjects import encode_name

DRAIN_S = 30.0
EXIT_S = 5.0
# A worker that has not joined by then never will; weights of a large model take minutes.
START_TIMEOUT_S = 1800.0


class WorkerProcess:
    """Owns the process.

    Attributes:
        id: Its name as a worker, by which its heartbeats are known.
        wish: What it serves.
        failure: Why it ended by itself; None while it runs, and when it was stopped.
    """

    def __init__(
        self,
        wish: Wish,
        environ: Mapping[str, str],
        logs: Path,
        console: Console,
        hang_timeout_s: float,
        on_end: Callable[[WorkerProcess], None],
    ) -> None:
        self.id = f"{encode_name(wish.name)[:80]}-{secrets.token_hex(4)}"
        self.wish = wish
        self.failure: str | None = None
        self.beat: Heartbeat | None = None
        self._clock = asyncio.get_running_loop().time
        self.started_at = self._clock()
        self._ready_at: float | None = None
        self._on_end = on_end
        self._stopping: asyncio.Task[None] | None = None
        self._liveness = Liveness(hang_timeout_s, WORKER_PATIENCE)
        self._has_beaten = False
        own = {
            "HEADRACE_MODEL": wish.path,
            "HEADRACE_SERVED_MODEL_NAME": wish.name,
            "HEADRACE_WORKER_ID": self.id,
            "HEADRACE_DRAIN_TIMEOUT_S": f"{DRAIN_S:g}",
        }
        if wish.generation:
            own["HEADRACE_ALLOW_REVISION_CHANGE"] = "true"
        arguments = (sys.executable, "-P", "-m", "ops.cli", *commands.WORKER[1:])
        spec = ChildSpec("worker", self.id, arguments, {**environ, **wish.environ, **own}, DRAIN_S + EXIT_S)
        self._child = Child(spec, logs, console, started=lambda child: None, ended=self._ended)
        self._log = logs / f"{self.id}.log"

    def start(self) -> None:
        """Start the process."""
        self._child.start()

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._child.pid

    @property
    def phase(self) -> Literal["loading", "ready", "stopping"]:
        """How far its life is."""
        if self._stopping is not None:
            return "stopping"
        return "loading" if self._ready_at is None else "ready"

    def seen(self) -> SeenWorker:
        """Return it as decisions are made of it."""
        busy = self.beat is not None and self.beat.running + self.beat.waiting > 0
        ready_at = self.started_at if self._ready_at is None else self._ready_at
        wish = self.wish
        return SeenWorker(self.id, wish.name, wish.generation, wish.need_bytes, self.phase, ready_at, busy)

    def note_heartbeat(self, beat: Heartbeat) -> float | None:
        """Take in a heartbeat; return, with the first, how long the start took."""
        self.beat, self._has_beaten = beat, True
        if self._ready_at is not None:
            return None
        self._ready_at = self._clock()
        return self._ready_at - self.started_at

    def watch(self, round_s: float, *, can_judge: bool) -> None:
        """Take note of a round; kill a process that stands still, or has not joined for too long."""
        pid = self._child.pid
        stopped = pid is not None and is_stopped(pid)
        answered, self._has_beaten = self._has_beaten, False
        still = self._liveness.note_round(pid, round_s, answered=answered, stopped=stopped, can_judge=can_judge)
        if still or (self._ready_at is None and self._clock() - self.started_at > START_TIMEOUT_S):
            self._child.replace()

    def stop(self) -> None:
        """Have it drain and end, in the background: what it has not finished goes to another worker."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name=f"stop of {self.id}")

    async def wait(self) -> None:
        """Wait until a process that was told to stop has ended."""
        if self._stopping is not None:
            await self._stopping

    def kill(self) -> None:
        """End it at once."""
        self._child.kill()

    async def _stop(self) -> None:
        await self._child.stop()
        self._on_end(self)

    def _ended(self, child: Child, exit_: Exit) -> bool:
        last = exit_.last_lines[-1].removeprefix("headrace: ") if exit_.last_lines else "it wrote nothing"
        self.failure = f"{exit_.reason}: {last[:500]} (its log: {self._log})"
        self._on_end(self)
        return False
