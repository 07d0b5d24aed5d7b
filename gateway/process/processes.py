"""Several gateway processes on one port: fork them, replace those that end, stand still or drain, pass signals on.

The parent serves nothing and runs no event loop and no threads: it forks. It holds the listening sockets, and watches
each process through a pipe, into which the process writes one byte, its state, four times a second; a process sees its
parent's death at the end of another pipe. Silence is counted in the parent's own rounds, however long each was. A
process that begins to drain is replaced at once; SIGUSR1 drains the processes one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from gateway.process.listeners import Listeners

BEAT_INTERVAL_S = 0.25
RESTART_MIN_S = 0.5
RESTART_MAX_S = 10.0
STABLE_S = 10.0
# Rounds without a beat after which a process counts as frozen: 2 s; 30 s until its first beat.
FROZEN_ROUNDS = 8
START_ROUNDS = 120
# Rounds in which no process serves, 5 s, after which clients are refused rather than left waiting.
REFUSE_ROUNDS = 20
# A replacement runs beside the process that drains, and may have to be replaced itself meanwhile.
SLOTS_PER_PROCESS = 4
_PIPE_BYTES = 4096

_logger = logging.getLogger(__name__)


class ProcessState(enum.Enum):
    """State of a gateway process; the values are sent through the pipe."""

    STARTING = b"s"
    SERVING = b"r"
    DRAINING = b"d"


@dataclass(slots=True)
class ParentLink:
    """The process's end.

    Attributes:
        socket_index: Which of the public port's sockets is its own.
        parent_pipe: Readable once the parent is dead.
        state_pipe: Takes the beats.
    """

    socket_index: int
    parent_pipe: int
    state_pipe: int
    state: ProcessState = ProcessState.STARTING

    def enter(self, state: ProcessState) -> None:
        """Enter a state, and report it to the parent at once."""
        self.state = state
        self.beat()

    def beat(self) -> None:
        """Tell the parent that the event loop runs; go on if the parent does not read, or is dead."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.state_pipe, self.state.value)

    async def beat_forever(self) -> None:
        """Beat four times a second."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_INTERVAL_S)


@dataclass(slots=True)
class _Child:
    """One process. `socket_index` names its own socket, free again once it drains or was asked to (`is_leaving`)."""

    slot: int
    socket_index: int
    pid: int
    state_pipe: int
    started_at: float
    delay_s: float
    state: ProcessState | None = None
    is_leaving: bool = False
    silent_rounds: int = 0

    @property
    def is_frozen(self) -> bool:
        return self.silent_rounds >= (START_ROUNDS if self.state is None else FROZEN_ROUNDS)

    @property
    def is_serving(self) -> bool:
        return self.state is ProcessState.SERVING and not self.is_leaving


@dataclass(frozen=True, slots=True)
class _Start:
    """A process to be forked at a time of the monotonic clock; `delay_s` is for the one after it, if it fails soon."""

    at: float
    delay_s: float


class ProcessGroup:
    """The children, while the parent waits for them."""

    def __init__(
        self,
        num_processes: int,
        listeners: Listeners,
        run: Callable[[int, ParentLink], int],
        ended: Callable[[int], None],
    ) -> None:
        """Run `run(slot, link)` in each child; it returns the exit status. `ended` is called with each freed slot."""
        self._num_processes = num_processes
        self._num_slots = num_processes * SLOTS_PER_PROCESS
        self._listeners = listeners
        self._run = run
        self._ended = ended
        self._children: dict[int, _Child] = {}
        self._starts = [_Start(0.0, RESTART_MIN_S)] * num_processes
        self._to_drain: list[int] = []
        self._poll = select.poll()
        self._unserved_rounds = 0
        self._is_refusing = True
        self._is_stopping = False
        self._status = 0
        self._pipe_read, self._pipe_write = os.pipe()

    def serve(self) -> int:
        """Run until SIGTERM or SIGINT; return 0, or the status of a child that ended badly while stopping."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGUSR1, self._drain_all)
        next_round = time.monotonic()
        while self._children or not self._is_stopping:
            self._start_due()
            self._read_beats(max(0.0, next_round - time.monotonic()))
            self._reap()
            if time.monotonic() >= next_round:
                next_round = time.monotonic() + BEAT_INTERVAL_S
                self._judge()
                self._drain_next()
        return self._status

    def _start_due(self) -> None:
        now = time.monotonic()
        due = [start for start in self._starts if start.at <= now and not self._is_stopping]
        for start in due:
            taken = {child.slot for child in self._children.values()}
            slot = next((slot for slot in range(self._num_slots) if slot not in taken), None)
            if slot is None:
                return
            self._starts.remove(start)
            self._fork(slot, start.delay_s)

    def _fork(self, slot: int, delay_s: float) -> None:
        taken = {child.socket_index for child in self._children.values() if not child.is_leaving}
        socket_index = next(socket_index for socket_index in range(self._num_processes) if socket_index not in taken)
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        pid = os.fork()
        if pid == 0:
            os.close(read)
            self._become_child(slot, ParentLink(socket_index, self._pipe_read, write))
        os.close(write)
        self._poll.register(read, select.POLLIN)
        self._children[pid] = _Child(slot, socket_index, pid, read, time.monotonic(), delay_s)
        if self._is_stopping:
            # The signal came in between, and this child has not had it.
            os.kill(pid, signal.SIGTERM)

    def _become_child(self, slot: int, link: ParentLink) -> None:
        status = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            os.close(self._pipe_write)
            for sibling in self._children.values():
                os.close(sibling.state_pipe)
            status = self._run(slot, link)
        except Exception:
            _logger.exception("gateway process %d failed", slot)
        finally:
            # Not `sys.exit`: the parent's stack, which this process shares, must not run on.
            logging.shutdown()
            os._exit(status)

    def _read_beats(self, wait_s: float) -> None:
        ready = {descriptor for descriptor, _ in self._poll.poll(wait_s * 1000)}
        for child in self._children.values():
            if child.state_pipe not in ready:
                continue
            beats = os.read(child.state_pipe, _PIPE_BYTES)
            if not beats:
                # It ends: no more beats will come, and the exit is about to be seen.
                self._poll.unregister(child.state_pipe)
                continue
            child.silent_rounds = 0
            self._note_state(child, ProcessState(beats[-1:]))

    def _note_state(self, child: _Child, state: ProcessState) -> None:
        child.state = state
        if state is ProcessState.DRAINING:
            self._leave(child)
        elif child.is_serving:
            self._unserved_rounds = 0
            if self._is_refusing and not self._is_stopping:
                # The child has made them listen; should `refuse` have come in between, this undoes it.
                self._is_refusing = False
                # Closed when a signal to stop came in between.
                with contextlib.suppress(OSError):
                    self._listeners.listen()

    def _leave(self, child: _Child) -> None:
        if not child.is_leaving:
            child.is_leaving = True
            self._starts.append(_Start(time.monotonic(), RESTART_MIN_S))

    def _reap(self) -> None:
        while True:
            try:
                pid, raw_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(child.state_pipe)
                os.close(child.state_pipe)
                self._ended(child.slot)
                self._note_exit(child, os.waitstatus_to_exitcode(raw_status))

    def _note_exit(self, child: _Child, exit_code: int) -> None:
        lived_s = time.monotonic() - child.started_at
        reason = f"signal {-exit_code}" if exit_code < 0 else f"status {exit_code}"
        if self._is_stopping:
            self._status = self._status or abs(exit_code)
        elif child.is_leaving:
            _logger.info("process %d drained and ended with %s after %.1f s", child.slot, reason, lived_s)
        else:
            delay_s = RESTART_MIN_S if lived_s > STABLE_S else child.delay_s
            text = "process %d ended with %s after %.1f s; another one in %.1f s"
            _logger.error(text, child.slot, reason, lived_s, delay_s)
            self._starts.append(_Start(time.monotonic() + delay_s, min(RESTART_MAX_S, delay_s * 2)))

    def _judge(self) -> None:
        for child in self._children.values():
            child.silent_rounds += 1
            if child.is_frozen:
                silence_s = child.silent_rounds * BEAT_INTERVAL_S
                _logger.error("process %d, pid %d, stood still for %.1f s: killed", child.slot, child.pid, silence_s)
                os.kill(child.pid, signal.SIGKILL)
                child.silent_rounds = 0
        if any(child.is_serving for child in self._children.values()):
            return
        self._unserved_rounds += 1
        if self._unserved_rounds >= REFUSE_ROUNDS and not self._is_refusing and not self._is_stopping:
            _logger.error("no process has served for a while: clients are refused")
            self._is_refusing = True
            with contextlib.suppress(OSError):
                self._listeners.refuse()

    def _drain_next(self) -> None:
        wanted = [child for child in self._children.values() if not child.is_leaving]
        if self._to_drain and not self._starts and all(child.is_serving for child in wanted):
            child = self._children.get(self._to_drain.pop(0))
            if child is not None:
                self._leave(child)
                os.kill(child.pid, signal.SIGTERM)

    def _drain_all(self, number: int, frame: FrameType | None) -> None:
        self._to_drain = [pid for pid, child in self._children.items() if not child.is_leaving]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        self._listeners.close()
        for pid in list(self._children):
            # It may have been reaped just now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
