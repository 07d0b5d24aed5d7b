"""The supervisor: starts the children in order, says when the system is ready, keeps it so, and stops it in order.

Owns the children and the ready files. Children tell it of their starts and ends through two callbacks; `liveness` finds
those that stand still.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from gpu_worker.start.settings_problem import EXIT_BAD_SETTINGS
from ops.stack import probe
from ops.stack.child import Child, ChildSpec, Exit, children_of
from ops.stack.console import Console, StartProgress, read_progress, told_while
from ops.stack.hosting.host import Host
from ops.stack.liveness import StorageWatch, Watch
from ops.stack.plan import EXIT_S, WORKER_DRAIN_S, Plan
from ops.stack.roll_call import RollCall
from ops.stack.state import READY_FILE, ReadyFile, StateDirectory, write_ready_file
from shared.errors import DependencyError

_POLL_S = 0.05
_LOOK_AGAIN_S = 0.5
# A child that ends so often before the system was ever ready will not become better by itself.
_MAX_EARLY_EXITS = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs one plan; `model` is the name of the served model, once the system is ready."""

    def __init__(
        self,
        plan: Plan,
        state: StateDirectory,
        ready_file: Path | None,
        console: Console,
        hang_timeout_s: float,
        host: Host,
    ) -> None:
        self.model: str | None = None
        self._plan = plan
        self._state = state
        self._ready_files = [state.path / READY_FILE, *([ready_file] if ready_file else [])]
        self._console = console
        self._children: list[Child] = []
        self._roll_call = RollCall(plan.admin, partial(console.say, "nats"))
        self._hang_timeout_s = hang_timeout_s
        self._host = host
        self._hosting: asyncio.Task[None] | None = None
        self._storage = StorageWatch(state.path, self._replace_nats)
        self._watching: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._failure: DependencyError | None = None
        self._written: ReadyFile | None = None
        self._unwritten: str | None = None
        self._progress: dict[str, StartProgress] = {}
        self._missing = probe.NO_WORKER

    async def start(self) -> bool:
        """Start everything and wait until a generation has succeeded; False if told to stop before.

        Raises:
            DependencyError: A child cannot run; the message says which and why.
        """
        self._remove_ready_files()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        starting = asyncio.create_task(self._start_in_order())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            if not starting.done():
                return False
            self.model = starting.result()
        finally:
            for task in (starting, stopped):
                task.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)
        # Sleeping models could answer the probe too, so they are announced only after it.
        workers = [child for child in self._children if child.spec.role == "worker"]
        self._host.adopt(workers, loop.time() - began, self._roll_call.cordon)
        await self._host.start()
        self._hosting = asyncio.create_task(self._host.run())
        self._write_ready_files()
        return True

    async def wait(self) -> None:
        """Wait until told to stop by a signal, and keep the ready files true meanwhile."""
        while not self._stop.is_set():
            # Gateway processes are restarted by their own parent, which does not tell us.
            self._write_ready_files()
            for task in (self._watching, self._hosting):
                if task is not None and task.done():
                    task.result()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _LOOK_AGAIN_S)

    async def stop(self) -> None:
        """Stop the children: gateways first, then workers, then the servers."""
        self._remove_ready_files()
        self._stop.set()
        for task in (self._watching, self._hosting):
            if task is not None:
                task.cancel()
        for roles in (("gateway",), ("worker",), ("redis", "nats")):
            if "worker" in roles:
                await self._host.stop(WORKER_DRAIN_S + EXIT_S)
            if "nats" in roles:
                await self._roll_call.close()
            await asyncio.gather(*(child.stop() for child in self._children if child.spec.role in roles))

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            self._console.say("headrace", "stopping; Ctrl-C again kills")
            self._stop.set()
        elif number == signal.SIGINT:
            self._host.kill()
            for child in self._children:
                child.kill()

    async def _start_in_order(self) -> str:
        plan = self._plan
        self._start_children(spec for spec in (plan.nats, plan.redis) if spec is not None)
        if plan.redis_url is None:
            self._console.say("redis", "no redis-server found: running without the response cache")
        try:
            await self._roll_call.open()
        except DependencyError as error:
            if plan.nats is None:
                raise
            log = self._state.logs / f"{plan.nats.name}.log"
            told = f"This command has started that NATS (its log: {log}); on a busy machine, run it again."
            raise DependencyError(f"{error} {told}") from error
        self._start_children((plan.gateway, *plan.workers))
        watch = Watch(self._children, self._roll_call, self._console, self._hang_timeout_s)
        self._watching = asyncio.create_task(self._watch(watch))
        return await told_while(self._ask_until_answered(), self._waited_for, partial(self._console.say, "headrace"))

    def _start_children(self, specs: Iterable[ChildSpec]) -> None:
        for spec in specs:
            logged = self._storage.note_line if spec.role == "nats" else None
            if spec.role == "worker":
                logged = partial(self._note_progress, spec.name)
            child = Child(
                spec, self._state.logs, self._console, started=self._started, ended=self._ended, logged=logged
            )
            self._children.append(child)
            child.start()

    def _note_progress(self, worker: str, line: bytes) -> None:
        progress = None if self.model is not None else read_progress(line)
        if progress is None:
            return
        is_new = progress.title not in {other.title for other in self._progress.values()}
        self._progress[worker] = progress
        if not self._console.draw(worker, progress.bar) and is_new:
            self._console.say(worker, progress.title)

    async def _watch(self, watch: Watch) -> None:
        await asyncio.gather(watch.run(), self._storage.run())

    def _replace_nats(self) -> None:
        self._console.say("nats", "still finds no room on a disk that has some; starting it anew")
        for child in self._children:
            if child.spec.role == "nats":
                child.replace()

    async def _ask_until_answered(self) -> str:
        answered: set[str] = set()
        while True:
            model, missing = await probe.first_generation(
                self._plan.url, self._plan.probe_key, self._note_missing, answered
            )
            self._note_missing(missing)
            if model is not None and not self._absent_workers():
                return model
            await asyncio.sleep(_POLL_S)

    def _note_missing(self, missing: str) -> None:
        self._missing = missing

    def _waited_for(self) -> str:
        is_of_workers = self._missing in (probe.NO_WORKER, probe.READY)
        return self._workers_doing(self._absent_workers()) if is_of_workers else self._missing

    def _workers_doing(self, absent: int) -> str:
        doing = sorted({progress.text for progress in self._progress.values()}) or ["starting"]
        who = "the worker is" if len(self._plan.workers) == 1 else f"{absent} of {len(self._plan.workers)} workers are"
        return f"{who} {', '.join(doing)}"

    def _absent_workers(self) -> int:
        if self._roll_call.is_forbidden:
            return 0
        return len(self._plan.workers) - len(self._roll_call.workers & set(self._pids("worker")))

    def _pids(self, role: str) -> list[int]:
        return [child.pid for child in self._children if child.spec.role == role and child.pid is not None]

    def _gateway_processes(self) -> list[int]:
        parents = self._pids("gateway")
        if self._plan.gateway.environ["HEADRACE_PROCESSES"] == "1":
            return parents
        return [pid for parent in parents for pid in children_of(parent)] or parents

    def _started(self, child: Child) -> None:
        self._console.say(child.spec.name, f"started, pid {child.pid}")
        if self.model is not None:
            self._write_ready_files()

    def _ended(self, child: Child, exit_: Exit) -> bool:
        """Take note of an end; return whether the child is to be started again."""
        if self.model is not None:
            self._write_ready_files()
        elif child.spec.role != "redis" and (exit_.returncode == EXIT_BAD_SETTINGS or child.exits >= _MAX_EARLY_EXITS):
            log = self._state.logs / f"{child.spec.name}.log"
            last = exit_.last_lines[-1].removeprefix("headrace: ") if exit_.last_lines else "it wrote nothing"
            self._failure = DependencyError(f"{child.spec.name} {exit_.reason}: {last} (its log: {log})")
            self._stop.set()
            return False
        return True

    def _write_ready_files(self) -> None:
        plan = self._plan
        readiness = ReadyFile(
            url=plan.url,
            api_key=plan.api_key,
            nats_url=plan.batch.full_url,
            admin_nats_url=plan.admin.full_url,
            worker_nats_url=plan.worker.full_url,
            redis_url=plan.redis_url,
            metrics_url=f"{plan.operator_url}/metrics",
            operator_key=plan.operator_key,
            pids={
                "gateway": self._gateway_processes(),
                "worker": [*self._pids("worker"), *self._host.pids],
                "nats": self._pids("nats"),
                "redis": self._pids("redis"),
            },
        )
        if readiness == self._written:
            return
        untold = None
        for path in self._ready_files:
            try:
                write_ready_file(path, readiness)
            except OSError as error:
                # On a full disk, say: what runs goes on, children are started anew, and this is tried again.
                untold = f"{path} cannot be written: {error.strerror}; other commands may not find what runs"
        if untold is None:
            self._written = readiness
        elif untold != self._unwritten:
            self._console.say("headrace", untold)
        self._unwritten = untold

    def _remove_ready_files(self) -> None:
        for path in self._ready_files:
            path.unlink(missing_ok=True)
