"""A parent of two gateway processes that serve, without any: entries of its list, and the system's calls are noted."""

from __future__ import annotations

import os
import select
from types import SimpleNamespace

import pytest

from gateway.config import GatewayConfig
from gateway.process import processes
from gateway.process.listeners import Listeners, bind_listeners
from gateway.process.processes import RESTART_MIN_S, ProcessGroup, ProcessState, _Child

PIDS = (101, 102)
# Its clock stands still.
NOW = 5000.0


class ParentOfTwo:
    """Its methods are called by the test; what it would do to processes and sockets is in the lists."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.freed: list[int] = []
        self.calls: list[str] = []
        self.killed: list[tuple[int, int]] = []
        self.forked: list[tuple[int, float]] = []
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: NOW))
        listeners = bind_listeners(GatewayConfig(port=0, processes=2))
        self.listeners = listeners
        self.group = ProcessGroup(2, listeners, lambda slot, link: 0, self.freed.append)
        self.group._starts.clear()
        self.pipes = [os.pipe() for _ in PIDS]
        for number, (pid, (read, _)) in enumerate(zip(PIDS, self.pipes, strict=True)):
            self.group._children[pid] = _Child(number, number, pid, read, NOW, RESTART_MIN_S)
            self.group._poll.register(read, select.POLLIN)
        for name in ("listen", "refuse", "close"):
            monkeypatch.setattr(Listeners, name, lambda _, name=name: self.calls.append(name))
        monkeypatch.setattr(os, "kill", lambda pid, number: self.killed.append((pid, number)))
        monkeypatch.setattr(self.group, "_fork", lambda slot, delay_s: self.forked.append((slot, delay_s)))
        for pid in PIDS:
            self.group._note_state(self.child(pid), ProcessState.SERVING)

    def child(self, pid: int) -> _Child:
        return self.group._children[pid]

    def beat(self, number: int, beats: bytes = b"r") -> None:
        os.write(self.pipes[number][1], beats)

    def starts_in(self) -> list[float]:
        """Return in how many seconds processes are to be started."""
        return [start.at - NOW for start in self.group._starts]

    def close(self) -> None:
        for listener in self.listeners.sockets:
            listener.close()
        for descriptor in (
            *(end for pipe in self.pipes for end in pipe),
            self.group._pipe_read,
            self.group._pipe_write,
        ):
            os.close(descriptor)
