"""Rank 0's side of the group: starts the other ranks, sends them plans, watches that they live, and replaces dead ones.

When a rank dies, freezes or fails within a step, the group is *lost*: threads that wait for another rank are released,
and every step fails. `reform` then replaces the processes that are gone, while the others keep their weights, and all
ranks meet anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue

from gpu_worker.core.draft import Draft
from gpu_worker.core.model_runner import BrokenRunnerError
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.step import StepResult
from gpu_worker.execution.ranks import messages
from gpu_worker.execution.ranks.board import Life
from gpu_worker.execution.ranks.meeting import GroupRanks, group_ranks
from gpu_worker.execution.ranks.member import TICK_S, identity
from gpu_worker.execution.ranks.node import interface_of
from gpu_worker.execution.ranks.process import LocalHost, RankProcess
from gpu_worker.execution.ranks.remote import Remote, RemoteHost
from gpu_worker.execution.ranks.replies import RankLostError, RankTasks, Replies, wait_for_next
from gpu_worker.execution.ranks.watch import FREEZE_S, Watch, exit_within
from gpu_worker.execution.runner_config import RunnerConfig
from kernels.cpu_library import cpu_library
from shared.errors import ConfigError, HeadraceError
from shared.files import TemporaryFolder
from shared.worker_metrics import RankReading

_LOADING_FREEZE_S = 60.0
_MEETING_S = 120.0
_GOODBYE_S = 5.0
_REFUSAL_S = 1.0
_WARM_UP_FREEZE_S = 10.0
LEAVING_S = 5.0
"""Time that a rank has to leave a step when another was lost. A rank that waits for a GPU may never notice."""
_MAX_ATTEMPTS = 3
"""Times in a row that a group which cannot meet again tries to."""

_log = logging.getLogger(__name__)


class RankGroup:
    """All ranks of this worker.

    With `exits_when_stuck` this process ends when it does not leave a step in time in which a rank was lost.

    Attributes:
        board: That of this host.
        on_lost: Called on a thread of the group's own when a rank is gone.
        on_formed: Called when the group serves again after that, on the thread that calls `reform`.
        tasks: Tasks for the other ranks beside steps and between them.
        places: Returns the placement of experts at this rank, which all ranks adopt when they meet.
        epoch: How often ranks have met.
    """

    def __init__(
        self,
        config: RunnerConfig,
        log_level: str = "info",
        log_format: str = "text",
        *,
        exits_when_stuck: bool = False,
        remote: Remote | None = None,
    ) -> None:
        """Start the other ranks, and meet them; `ConfigError` if one does not come, or is not what this one is."""
        self.size = config.num_ranks
        self.on_lost: Callable[[], object] = lambda: None
        self.on_formed: Callable[[], object] = lambda: None
        self.places: Callable[[], messages.Places] = list
        self.epoch = 0
        self._config = config
        self._remote = remote
        is_alone = remote is None and config.pipeline_parallel_size == 1
        is_shared = is_alone and config.device == "cpu" and cpu_library() is not None
        interface = "" if remote is None else interface_of(remote.address)
        own = LocalHost(config, is_shared=is_shared, log_level=log_level, log_format=log_format, interface=interface)
        self._hosts: list[LocalHost | RemoteHost] = [own, *([] if remote is None else remote.hosts.values())]
        self.board = own.board
        self.ranks: GroupRanks = group_ranks(0, own.board, config, is_shared=is_shared, interface=interface)
        self._folder = TemporaryFolder("headrace-group-")
        self._exits_when_stuck = exits_when_stuck
        self._stuck: threading.Timer | None = None
        self._lost: str | None = None
        self._is_leaving = self._is_closing = self._is_forming = False
        self._lock = threading.Lock()
        self._processes: dict[int, RankProcess] = {}
        self._replies = Replies(self._processes)
        self._landed: SimpleQueue[StepResult] = SimpleQueue()
        self.tasks = RankTasks(lambda message: self.send([message]), self.check, self.size - 1)
        self._watch = Watch(lambda: list(self._processes.values()), lambda rank: self._life(rank).ticks, self._froze)
        try:
            with self.building():
                self._greet([self._start(rank) for rank in range(1, self.size)])
                self._meet()
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> str | None:
        """Why the group is lost; None while it is not."""
        return self._lost

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank."""
        return {0: os.getpid()} | {rank: process.pid for rank, process in self._processes.items()}

    def readings(self) -> tuple[RankReading, ...]:
        """Return the current state of each rank."""
        readings = []
        for rank in range(self.size):
            life, process = self._life(rank), self._processes.get(rank)
            is_alive = rank == 0 or (process is not None and process.epitaph is None and process.is_serving)
            readings.append(RankReading(rank, is_alive, life.step, self._watch.silent_s(rank), life.loads))
        return tuple(readings)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Tell of a rank that is lost meanwhile, in place of what this one fails by then; end the others if it fails.

        Raises:
            ConfigError: A rank was lost.
        """
        try:
            yield
        except Exception as error:
            is_lost = isinstance(error, RankLostError)
            is_told = isinstance(error, HeadraceError) and not is_lost
            problem = None if is_told else self._lost or (str(error) if is_lost else self.cause())
            self._is_closing = True
            for process in self._processes.values():
                process.tell(messages.encode(messages.Refuse(problem or str(error))))
            if self._remote is not None:
                self._remote.refuse(problem or str(error))
            self.close(_REFUSAL_S)
            if problem is None:
                raise
            raise self._config.error(f"but {problem}") from error

    def begin(self) -> None:
        """Say that loading is over: from now on a rank that stands still is missed at once."""
        for process in self._processes.values():
            process.freeze_s = FREEZE_S
            process.is_serving = True

    def tell(self, plan: StepPlan, drafts: list[Draft] | None) -> None:
        """Send a step to all other ranks; one that is gone is found by the watch."""
        self.send([messages.encode(messages.Order(plan, drafts))])

    def send(self, encoded: Iterable[bytes]) -> None:
        """Send encoded messages to all other ranks, between the steps that they were and will be told of."""
        for message in encoded:
            for host in self._hosts:
                host.tell(message)

    def landed(self) -> StepResult:
        """Wait for what the rank that draws tokens says of the next step; `RankLostError` if the group is lost."""
        return wait_for_next(self._landed, self.check)

    def check(self) -> None:
        """Raise `RankLostError` if the group is lost, or ends."""
        if self._lost is not None or self._is_closing:
            raise RankLostError(self._lost or "the worker ends")

    def cause(self) -> str | None:
        """Return which rank is gone, after something failed: its end may be seen a little later than its silence."""
        deadline = time.monotonic() + 5 * TICK_S
        while self._lost is None and time.monotonic() < deadline:
            time.sleep(TICK_S / 4)
        return self._lost

    def end(self, problem: str) -> None:
        """Lose the group, once: no rank computes any more until it is formed again."""
        with self._lock:
            if self._lost is not None or self._is_closing:
                return
            # Before others see that it is lost: who leaves its step stops the timer.
            if self._exits_when_stuck:
                self._stuck = exit_within(LEAVING_S)
            self._lost = problem
        _log.error("the group of ranks is lost: %s", problem)
        own, *others = self._hosts
        own.end()
        self.ranks.abort()
        self.on_lost()
        # Last, because one that takes nothing is waited for.
        for host in others:
            host.end()

    def reform(self, num_blocks: int, restart: Callable[[], None]) -> None:
        """Replace the ranks that are gone, and meet again.

        Args:
            num_blocks: KV blocks of each rank.
            restart: Does on this rank what the others do when they have met.

        Raises:
            BrokenRunnerError: That does not succeed.
        """
        began, replaced = time.monotonic(), set[int]()
        self._is_forming = True
        self._end_stuck_timer()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                replaced |= self._replace_lost(num_blocks)
                self._meet()
                restart()
                break
            except Exception as error:
                problem = str(error) if isinstance(error, RankLostError) else self.cause()
                if self._is_leaving or isinstance(error, ConfigError) or attempt == _MAX_ATTEMPTS or problem is None:
                    _log.error("the group of ranks cannot be formed again: %s", problem or error)
                    self.end(problem or str(error))
                    self._end_stuck_timer()
                    raise BrokenRunnerError(error, is_logged=problem is not None) from error
                _log.warning("the group of ranks has to be formed anew: %s", problem)
                self.end(problem)
                self._end_stuck_timer()
        self._is_forming = False
        self.begin()
        seconds = time.monotonic() - began
        extra = {"epoch": self.epoch, "replaced": sorted(replaced), "seconds": round(seconds, 2)}
        _log.warning("the group of ranks serves again", extra=extra)
        self.on_formed()

    def stop_forming(self) -> None:
        """Let `reform` fail, because the worker ends."""
        self._is_leaving = True
        self._replies.stop()
        if self._is_forming and self._remote is not None:
            self._remote.close()

    def close(self, timeout_s: float | None = None) -> None:
        """Let the other ranks end, and wait for that; kill those that have not after a while."""
        with self._lock:
            self._is_closing = True
        self._end_stuck_timer()
        if timeout_s is None:
            timeout_s = 0.0 if self._lost is not None else _GOODBYE_S
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            process.close(deadline - time.monotonic())
        self._watch.close()
        if self._remote is not None:
            self._remote.close()
        self.ranks.leave()
        self._folder.cleanup()

    def _start(self, rank: int) -> RankProcess:
        self._processes.pop(rank, None)
        process = self._hosts[rank // self._config.ranks_per_host].start(rank, self._hear)
        process.freeze_s = _LOADING_FREEZE_S
        self._processes[rank] = process
        return process

    def _life(self, rank: int) -> Life:
        return self._hosts[rank // self._config.ranks_per_host].life(rank)

    def _froze(self, process: RankProcess, silent_s: float) -> None:
        """End a rank that stands still, unless it is known to be gone: another may be on its way to its place."""
        if process.epitaph is not None or self._processes.get(process.rank) is not process:
            return
        self.end(f"{process.name} has stood still for {silent_s:.1f} s")
        process.kill()

    def _hear(self, process: RankProcess, reply: messages.Reply | None) -> None:
        if self._processes.get(process.rank) not in (process, None):
            return
        if isinstance(reply, messages.Landed):
            self._landed.put(reply.result)
        elif isinstance(reply, messages.Done):
            self.tasks.put(process.rank, reply)
        elif isinstance(reply, messages.Stumbled):
            threading.Thread(target=self._stumbled, args=(process, reply.problem), daemon=True).start()
        else:
            self._replies.put(process, reply)
            if process.epitaph is not None:
                self.end(process.epitaph)

    def _stumbled(self, process: RankProcess, problem: str) -> None:
        """Lose the group because a rank could not compute, unless another is gone, which is about to be seen."""
        if self.cause() is None:
            self.end(f"{process.name} failed within a step: {problem}")

    def _greet(self, processes: list[RankProcess]) -> None:
        """Wait for what new ranks say of themselves, which must be the same as this one's."""
        own = identity(self._config)
        for rank, said in self._replies.wait(processes, messages.Hello, _MEETING_S).items():
            assert isinstance(said, messages.Hello)
            for name, value in own.items():
                if (other := said.identity.get(name)) != value:
                    raise self._config.error(f"but rank {rank} has another {name}: {other}, and rank 0 has {value}")

    def _meet(self) -> None:
        """Let all ranks meet, who then warm up, for which there is a little more time than for a tick."""
        self.epoch += 1
        # Of steps of the epoch before.
        self._landed = SimpleQueue()
        for process in self._processes.values():
            process.freeze_s = max(process.freeze_s, _WARM_UP_FREEZE_S)
        file = Path(self._folder.name) / f"epoch-{self.epoch}"
        store = str(file) if self._remote is None else self._remote.new_store()
        self.send([messages.encode(messages.Meet(store, self.places()))])
        self.ranks.join(store)

    def _replace_lost(self, num_blocks: int) -> set[int]:
        """Let the ranks that live leave the group, start others in place of those that are gone, and wait for both.

        Returns:
            The ranks that were replaced.

        Raises:
            RankLostError: One is gone, again or meanwhile.
            ConfigError: A new one is not what this one is.
        """
        self.ranks.leave()
        living = [process for process in self._processes.values() if process.epitaph is None]
        for process in living:
            process.tell(messages.encode(messages.Leave(self.epoch + 1)))
        # One that is stuck in a step is replaced too.
        ready = self._replies.wait(living, messages.Ready, LEAVING_S, self.epoch + 1, needs_all=False)
        for process in living:
            if process.rank not in ready:
                process.close(0.0)
        gone = {rank for rank in range(1, self.size) if rank not in ready or self._processes[rank].epitaph is not None}
        for rank in gone & self._processes.keys():
            self._processes[rank].close(0.0)
        # No rank uses the board now: the survivors have said so, and the others have ended.
        for host in self._hosts:
            host.begin_again()
        with self._lock:
            self._lost = None
        new = [self._start(rank) for rank in sorted(gone)]
        self._greet(new)
        for process in new:
            process.tell(messages.encode(messages.Load(self.epoch + 1, num_blocks, self.places())))
        self._replies.wait(new, messages.Ready, None, self.epoch + 1)
        for process in self._processes.values():
            if process.epitaph is not None:
                raise RankLostError(process.epitaph)
        return gone

    def _end_stuck_timer(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
