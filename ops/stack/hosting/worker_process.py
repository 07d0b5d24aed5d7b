"""The worker processes of a host.

`WorkerProcess` is one that the host starts: once, watched by its heartbeats, and never started again by itself.
`AdoptedWorker` is one that `headrace up` starts, watches and starts again; the host only has it drain and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Literal

from gpu_worker.start.settings_problem import EXIT_BAD_SETTINGS
from ops.stack.child import Child, ChildSpec, Exit, is_stopped
from ops.stack.console import Console
from ops.stack.hosting.reconcile import SeenWorker
from ops.stack.hosting.wishes import Wish
from ops.stack.liveness import WORKER_PATIENCE, Liveness
from shared.errors import DependencyError
from shared.messages import Heartbeat
from shared.subjects import encode_name

DRAIN_S = 30.0
EXIT_S = 5.0
# A worker that has not joined by then never will; weights of a large model take minutes.
START_TIMEOUT_S = 1800.0


class HostedWorker(ABC):
    """Common base of both kinds of workers: phases, and the last heartbeat.

    Attributes:
        id: Its name among the processes of the host.
        wish: What it serves.
        failure: Why it ended by itself; None while it runs, and when it was stopped.
        has_bad_settings: It ended because of a setting, the model's files or a server.
    """

    _child: Child

    def __init__(self, id_: str, wish: Wish, on_end: Callable[[HostedWorker], None]) -> None:
        self.id = id_
        self.wish = wish
        self.failure: str | None = None
        self.has_bad_settings = False
        self.beat: Heartbeat | None = None
        self._clock = asyncio.get_running_loop().time
        self.started_at = self._clock()
        self._ready_at: float | None = None
        self._on_end = on_end
        self._stopping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._child.pid

    @abstractmethod
    def watch(self, round_s: float, *, can_judge: bool) -> None:
        """Record a round of this many seconds, in which signs of life would have been noticed if `can_judge`."""

    @abstractmethod
    async def _end(self) -> None:
        """Have the process drain and end."""

    @property
    def phase(self) -> Literal["loading", "ready", "stopping"]:
        """How far its life is."""
        if self._stopping is not None:
            return "stopping"
        return "loading" if self._ready_at is None else "ready"

    def seen(self) -> SeenWorker:
        """Return it as decisions are made of it."""
        num = num_batch = 0
        if self.beat is not None:
            num, metrics = self.beat.running + self.beat.waiting, self.beat.metrics
            num_batch = 0 if metrics is None else metrics.running_batch + metrics.waiting_batch
        ready_at = self.started_at if self._ready_at is None else self._ready_at
        wish = self.wish
        name, generation, need_bytes = wish.name, wish.generation, wish.need_bytes
        return SeenWorker(self.id, name, generation, need_bytes, self.phase, ready_at, num > 0, num == num_batch)

    def note_heartbeat(self, beat: Heartbeat) -> float | None:
        """Take in a heartbeat; return, with the first, how long the start took."""
        self.beat = beat
        if self._ready_at is not None:
            return None
        self._ready_at = self._clock()
        return self._ready_at - self.started_at

    def stop(self) -> None:
        """Have it drain and end, in the background: unfinished requests go to another worker."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name=f"stop of {self.id}")

    async def _stop(self) -> None:
        await self._end()
        self._on_end(self)


class WorkerProcess(HostedWorker):
    """Owns the process; its heartbeats are known by its id."""

    def __init__(
        self,
        wish: Wish,
        environ: Mapping[str, str],
        logs: Path,
        console: Console,
        hang_timeout_s: float,
        on_end: Callable[[HostedWorker], None],
    ) -> None:
        super().__init__(f"{encode_name(wish.name)[:80]}-{secrets.token_hex(4)}", wish, on_end)
        self._liveness = Liveness(hang_timeout_s, WORKER_PATIENCE)
        self._has_beaten = False
        own = {
            "HEADRACE_MODEL": wish.path,
            "HEADRACE_SERVED_MODEL_NAME": wish.name,
            "HEADRACE_WORKER_ID": self.id,
            "HEADRACE_DRAIN_TIMEOUT_S": f"{DRAIN_S:g}",
        }
        if wish.is_replaced:
            own["HEADRACE_ALLOW_REVISION_CHANGE"] = "true"
        arguments = (sys.executable, "-P", "-m", "ops.cli", "worker")
        spec = ChildSpec("worker", self.id, arguments, {**environ, **wish.environ, **own}, DRAIN_S + EXIT_S)
        self._child = Child(spec, logs, console, started=lambda child: None, ended=self._ended)
        self._log = logs / f"{self.id}.log"

    def start(self) -> None:
        """Start the process."""
        self._child.start()

    def note_heartbeat(self, beat: Heartbeat) -> float | None:
        """Take in a heartbeat; return, with the first, how long the start took."""
        self._has_beaten = True
        return super().note_heartbeat(beat)

    def watch(self, round_s: float, *, can_judge: bool) -> None:
        """Take note of a round; kill a process that stands still, or has not joined for too long."""
        pid = self._child.pid
        stopped = pid is not None and is_stopped(pid)
        answered, self._has_beaten = self._has_beaten, False
        still = self._liveness.note_round(pid, round_s, answered=answered, stopped=stopped, can_judge=can_judge)
        if still or (self._ready_at is None and self._clock() - self.started_at > START_TIMEOUT_S):
            self._child.replace()

    async def wait(self) -> None:
        """Wait until a process that is stopping has ended."""
        if self._stopping is not None:
            await self._stopping

    def kill(self) -> None:
        """End it at once."""
        self._child.kill()

    async def _end(self) -> None:
        await self._child.stop()

    def _ended(self, child: Child, exit_: Exit) -> bool:
        last = exit_.last_lines[-1].removeprefix("headrace: ") if exit_.last_lines else "it wrote nothing"
        self.failure = f"{exit_.reason}: {last[:500]} (its log: {self._log})"
        self.has_bad_settings = exit_.returncode == EXIT_BAD_SETTINGS
        self._on_end(self)
        return False


class AdoptedWorker(HostedWorker):
    """A worker of `headrace up`, which starts it again when it ends. Its name is made up anew with each start."""

    def __init__(
        self, child: Child, wish: Wish, cordon: Callable[[str], Awaitable[None]], on_end: Callable[[HostedWorker], None]
    ) -> None:
        """Prepare; `cordon` tells the worker of that name to take no new requests."""
        super().__init__(child.spec.name, wish, on_end)
        self._child = child
        self._cordon = cordon
        self._pid = child.pid
        self._ready_at = self.started_at
        self._drained = asyncio.Event()

    def watch(self, round_s: float, *, can_judge: bool) -> None:
        """Notice a new start; its starter detects hangs."""
        if self._child.pid != self._pid:
            self._pid, self.beat, self._ready_at, self.started_at = self._child.pid, None, None, self._clock()

    def note_heartbeat(self, beat: Heartbeat) -> float | None:
        """Take in a heartbeat; return, with the first after a start, how long that took."""
        if beat.draining and not beat.running + beat.waiting:
            self._drained.set()
        return super().note_heartbeat(beat)

    def release(self) -> None:
        """Leave its shutdown to its starter."""
        if self._stopping is not None:
            self._stopping.cancel()

    async def _end(self) -> None:
        """Have it finish what it has first: the time that it takes for that by itself is that of a system that ends."""
        if self.beat is not None:
            with contextlib.suppress(DependencyError, TimeoutError):
                await self._cordon(self.beat.worker)
                await asyncio.wait_for(self._drained.wait(), DRAIN_S)
        await self._child.stop()
