"""The group as rank 0 has it: starts the other ranks, tells them plans, and watches that they live.

A rank that dies, or whose process stands still, ends the group: the other ranks are killed, so that whoever waits for
them in a collective is told at once, and every step from then on fails. The worker ends by that, as with any engine
that has broken down, and its requests go on elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_worker.core.draft import Draft
from gpu_worker.core.model_runner import BrokenRunnerError
from gpu_worker.core.plan import StepPlan
from gpu_worker.execution.ranks.board import make_board
from gpu_worker.execution.ranks.meeting import leave, meet
from gpu_worker.execution.ranks.member import TICK_S, identity
from gpu_worker.execution.ranks.messages import Failure, Hello, Order, Start, encode, receive
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.ranks import Ranks
from kernels.cpu_library import cpu_library
from shared.errors import ConfigError, HeadraceError

FREEZE_S = 1.0
"""Time without a tick after which a rank counts as standing still. Ten are due in it."""
_STARVED_FACTOR = 10.0
"""So many times longer may it be without one while it wants to run: others have the cores then."""
_LOADING_FREEZE_S = 60.0
_MEETING_S = 120.0
_GOODBYE_S = 5.0
LEAVING_S = 5.0
"""Time that a worker has to leave when a rank was lost. Whoever waits for a GPU may never be told."""
_MEMBER = "gpu_worker.execution.ranks.member"

_log = logging.getLogger(__name__)


class RankLostError(HeadraceError):
    """A rank is gone, and with it the group."""


class RankGroup:
    """All ranks of this worker.

    Attributes:
        on_lost: Called once, on a thread of the group's own, when a rank is gone.
    """

    def __init__(self, config: RunnerConfig, log_level: str = "info", log_format: str = "text") -> None:
        """Start the other ranks, and wait until all have met.

        Args:
            config: Settings of every rank's runner.
            log_level: As this process has it.
            log_format: As this process has it.

        Raises:
            ConfigError: A rank does not come, or is not what this one is.
        """
        self.size = config.tensor_parallel_size
        self.on_lost: Callable[[], object] = lambda: None
        self._ranks: Ranks | None = None
        self._config = config
        self._board = make_board(self.size)
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-ranks-")
        self._store = Path(self._folder.name) / "store"
        self._is_shared = config.device == "cpu" and cpu_library() is not None
        self._lost: str | None = None
        self._is_closing = False
        self._freeze_s = _LOADING_FREEZE_S
        self._lock = threading.Lock()
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, self.size):
                self._members[rank] = self._start(rank, log_level, log_format)
            self._meet()
            self._watcher.start()
            for member in self._members.values():
                _send(member, True)
            with self.building():
                self._ranks = meet(0, self._board, config, self._store, is_shared=self._is_shared)
        except BaseException:
            self.close()
            raise

    @property
    def ranks(self) -> Ranks:
        """This rank among the others."""
        assert self._ranks is not None, "they have met"
        return self._ranks

    @property
    def lost(self) -> str | None:
        """Why the group has ended; None while it has not."""
        return self._lost

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Tell of a rank that is lost meanwhile, in place of what this one fails by then; end the others if it fails.

        Raises:
            ConfigError: A rank was lost.
        """
        try:
            yield
        except Exception as error:
            problem = None if isinstance(error, HeadraceError) else self.cause()
            self.close()
            if problem is None:
                raise
            raise ConfigError("HEADRACE_TENSOR_PARALLEL_SIZE", f"is {self.size}, but {problem}") from error

    def begin(self) -> None:
        """Say that loading is over: from now on a rank that stands still is missed at once."""
        self._freeze_s = FREEZE_S

    def check(self) -> None:
        """Fail if the group has ended.

        Raises:
            BrokenRunnerError: It has.
        """
        if self._lost is not None:
            raise BrokenRunnerError(RankLostError(self._lost), is_logged=True)

    def tell(self, plan: StepPlan, drafts: list[Draft] | None) -> None:
        """Send a step to all other ranks; one that is gone is found by the watch."""
        order = encode(Order(plan, drafts))
        for member in self._members.values():
            assert member.stdin is not None
            with contextlib.suppress(OSError, ValueError):
                member.stdin.write(order)
                member.stdin.flush()

    def cause(self) -> str | None:
        """Return which rank is gone, after something failed: its end may be seen a little later than its silence."""
        deadline = time.monotonic() + 5 * TICK_S
        while self._lost is None and time.monotonic() < deadline:
            time.sleep(TICK_S / 4)
        return self._lost

    def end(self, problem: str) -> None:
        """End the group, once: no rank computes any more."""
        with self._lock:
            if self._lost is not None or self._is_closing:
                return
            self._lost = problem
        _log.error("the group of ranks has ended: %s", problem)
        self._board.end()
        self._kill()
        self.on_lost()

    def close(self) -> None:
        """Let the other ranks end, and wait for that."""
        with self._lock:
            self._is_closing = True
        for member in self._members.values():
            assert member.stdin is not None
            with contextlib.suppress(OSError):
                member.stdin.close()
        deadline = time.monotonic() + (0.0 if self._lost is not None else _GOODBYE_S)
        for member in self._members.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            # It may be reading what a rank that just ended has said.
            self._watcher.join()
        for member in self._members.values():
            member.wait()
            assert member.stdout is not None
            member.stdout.close()
        leave(self._ranks)
        self._ranks = None
        self._folder.cleanup()

    def _start(self, rank: int, log_level: str, log_format: str) -> subprocess.Popen[bytes]:
        """Start the process of a rank."""
        fd, config = self._board.fd, self._config
        member = subprocess.Popen(
            [sys.executable, "-m", _MEMBER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,)
        )
        _send(member, Start(rank, config, fd, str(self._store), self._is_shared, log_level, log_format))
        return member

    def _meet(self) -> None:
        """Wait for what each rank says of itself, which must be the same.

        Raises:
            ConfigError: One ends, says nothing in time, or is another.
        """
        own, late = identity(self._config), threading.Timer(_MEETING_S, self._kill)
        late.daemon = True
        late.start()
        try:
            for rank, member in self._members.items():
                said = receive(member.stdout, Hello | Failure) if member.stdout is not None else None
                problem = f"rank {rank} did not start within {_MEETING_S:g} s, or ended"
                if isinstance(said, Failure):
                    problem = f"rank {rank} cannot start: {said.problem}"
                if isinstance(said, Hello):
                    differing = [name for name in own if said.identity.get(name) != own[name]]
                    if not differing:
                        continue
                    name = differing[0]
                    problem = f"rank {rank} has another {name}: {said.identity.get(name)}, and rank 0 has {own[name]}"
                raise ConfigError("HEADRACE_TENSOR_PARALLEL_SIZE", f"is {self.size}, but {problem}")
        finally:
            late.cancel()

    def _watch(self) -> None:
        """Miss ranks that end or stand still, until one does or the group is closed."""
        seen, woke = {rank: (0, time.monotonic()) for rank in self._members}, time.monotonic()
        while not self._is_closing and self._lost is None:
            time.sleep(TICK_S / 2)
            now = time.monotonic()
            was_paused, woke = now - woke > FREEZE_S / 2, now
            for rank, member in self._members.items():
                ticks, since = self._board.ticks(rank), seen[rank][1]
                if ticks != seen[rank][0] or was_paused:
                    # Who was paused itself has missed ticks: it begins to wait anew.
                    seen[rank] = (ticks, now)
                elif now - since > self._freeze_s * (_STARVED_FACTOR if _wants_to_run(member.pid) else 1):
                    self.end(f"rank {rank} (process {member.pid}) has stood still for {now - since:.1f} s")
                if member.poll() is not None:
                    self.end(self._epitaph(rank, member))

    def _epitaph(self, rank: int, member: subprocess.Popen[bytes]) -> str:
        """Say why a rank's process has ended."""
        assert member.stdout is not None
        os.set_blocking(member.stdout.fileno(), False)
        with contextlib.suppress(OSError, TypeError):
            if isinstance(said := receive(member.stdout, Hello | Failure), Failure):
                return f"rank {rank} (process {member.pid}) failed: {said.problem}"
        return f"rank {rank} (process {member.pid}) ended with status {member.returncode}"

    def _kill(self) -> None:
        for member in self._members.values():
            if member.poll() is None:
                member.kill()


def exit_within(seconds: float) -> None:
    """End this process with status 1 if it has not ended by itself by then."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _wants_to_run(pid: int) -> bool:
    """Whether a thread of a process waits for a core, or has one; no where the system does not tell."""
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (OSError, IndexError):
        return False
    return "R" in states


def _send(member: subprocess.Popen[bytes], value: object) -> None:
    """Tell a rank something before it computes; one that is gone is found when it should answer."""
    assert member.stdin is not None
    with contextlib.suppress(OSError):
        member.stdin.write(encode(value))
        member.stdin.flush()
