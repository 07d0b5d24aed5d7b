"""Several gateway processes on one port: fork them, restart those that die, pass signals on.

The parent serves nothing. Each child binds the port itself with SO_REUSEPORT, so the kernel spreads connections, and
has its own gateway id. A child notices the parent's death by the end of a pipe and drains. The parent must run no
event loop and no threads: it forks.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

RESTART_MIN_S = 0.5
RESTART_MAX_S = 10.0
STABLE_S = 10.0

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Child:
    index: int
    pid: int
    started_at: float
    delay_s: float = RESTART_MIN_S


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen: it keeps the port for the children, or finds a free one."""
    return bind(host, port, is_shared=True)


def bind(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """Return a bound TCP socket; `is_shared` lets other processes bind the same port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


class ProcessGroup:
    """The children, while the parent waits for them."""

    def __init__(self, num_processes: int, run: Callable[[int, int], int]) -> None:
        """Run `run(index, parent_pipe)` in each child; its result is the child's exit status."""
        self._num_processes = num_processes
        self._run = run
        self._children: dict[int, _Child] = {}
        self._stopping: signal.Signals | None = None
        self._pipe_read, self._pipe_write = os.pipe()

    def serve(self) -> int:
        """Run until SIGTERM or SIGINT; return 0, or the status of a child that ended badly while stopping."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        for index in range(self._num_processes):
            self._fork(index, RESTART_MIN_S)
        status = 0
        while self._children:
            try:
                pid, raw_status = os.wait()
            except ChildProcessError:
                break
            child = self._children.pop(pid, None)
            if child is None:
                continue
            exit_code = os.waitstatus_to_exitcode(raw_status)
            if self._stopping is not None:
                status = status or abs(exit_code)
            else:
                self._restart(child, exit_code)
        return status

    def _restart(self, child: _Child, exit_code: int) -> None:
        lived_s = time.monotonic() - child.started_at
        delay_s = RESTART_MIN_S if lived_s > STABLE_S else child.delay_s
        reason = f"signal {-exit_code}" if exit_code < 0 else f"status {exit_code}"
        _logger.error("process %d ended with %s after %.1f s; again in %.1f s", child.index, reason, lived_s, delay_s)
        until = time.monotonic() + delay_s
        while self._stopping is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        if self._stopping is None:
            self._fork(child.index, min(RESTART_MAX_S, delay_s * 2))

    def _fork(self, index: int, delay_s: float) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_child(index)
        self._children[pid] = _Child(index, pid, time.monotonic(), delay_s)

    def _become_child(self, index: int) -> None:
        status = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.close(self._pipe_write)
            status = self._run(index, self._pipe_read)
        except Exception:
            _logger.exception("gateway process %d failed", index)
        finally:
            # Not `sys.exit`: the parent's stack, which this process shares, must not run on.
            logging.shutdown()
            os._exit(status)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = signal.Signals(number)
        for pid in list(self._children):
            os.kill(pid, signal.SIGTERM)
