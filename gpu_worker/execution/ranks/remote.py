"""The other hosts of a group, as rank 0 sees them: each connects, and starts ranks on rank 0's orders."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import msgspec
from torch._C._distributed_c10d import TCPStore

from gpu_worker.execution.ranks import messages
from gpu_worker.execution.ranks.board import Life
from gpu_worker.execution.ranks.link import Link, LinkError, LinkListener
from gpu_worker.execution.ranks.meeting import serve_store
from gpu_worker.execution.ranks.member import TICK_S
from gpu_worker.execution.ranks.process import Hear, RankProcess
from gpu_worker.execution.ranks.replies import RankLostError

COMING_S = 120.0
"""Time for a host to connect."""
_STARTING_S = 30.0
_KILLING_S = 1.0
_NO_LIFE = Life(0, 0, 0), False


class _RemoteProcess(RankProcess):
    """The process of a rank on another host."""

    def __init__(self, rank: int, pid: int, host: RemoteHost, hear: Hear) -> None:
        super().__init__(rank, pid, f"rank {rank} (process {pid} of host {host.node})")
        self.host = host
        self.hear = hear
        self.ended = threading.Event()

    @property
    def is_starved(self) -> bool:
        # A thread runs in the middle of every step: of a host that is silent it means nothing, unless that was busy.
        if self.host.silent_s > 2 * TICK_S:
            return self.host.is_busy
        return self.host.pulse.get(self.rank, _NO_LIFE)[1]

    def tell(self, message: bytes) -> None:
        self.host.send(messages.TellRank(self.rank, message))

    def kill(self) -> None:
        # A host that does not do it is cut off.
        if self.epitaph is None:
            # Sending may wait for a host that takes nothing.
            _after(_KILLING_S, self._give_up)
            self.host.send(messages.KillRank(self.rank))

    def close(self, timeout_s: float) -> None:
        self.ended.wait(max(0.0, timeout_s))
        self.kill()
        self.ended.wait()

    def end(self, epitaph: str) -> None:
        """Take note that it has ended."""
        if self.epitaph is None:
            self.epitaph = epitaph
            self.ended.set()
            self.hear(self, None)

    def _give_up(self) -> None:
        if not self.ended.is_set():
            self.host.drop()


class RemoteHost:
    """Does what `LocalHost` does, on another host, for as long as that is connected.

    Attributes:
        pulse: By rank, what each showed of its life last, and whether it wanted a core.
        is_busy: It got cores too late when it was heard last.
    """

    def __init__(self, node: int) -> None:
        self.node = node
        self._link: Link | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._pids: dict[int, int] = {}
        self._processes: dict[int, _RemoteProcess] = {}
        self.pulse: dict[int, tuple[Life, bool]] = {}
        self.is_busy = False
        self._heard = time.monotonic()

    @property
    def silent_s(self) -> float:
        """For how long it has not been heard."""
        return time.monotonic() - self._heard

    def attach(self, link: Link) -> bool:
        """Use a link for as long as it lasts, unless there is one or `close` was called; returns at once."""
        with self._changed:
            if self._link is not None or self._is_closed:
                return False
            self._link = link
            self._pids.clear()
            self._changed.notify_all()
        threading.Thread(target=self._receive, args=(link,), name=f"host {self.node}", daemon=True).start()
        return True

    def start(self, rank: int, hear: Hear) -> RankProcess:
        """Do what `LocalHost` does, when the host has connected; `RankLostError` if it does not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._link is not None or self._is_closed, COMING_S):
                raise RankLostError(f"host {self.node} did not connect within {COMING_S:g} s")
            if self._is_closed:
                raise RankLostError("the worker ends")
            self._pids.pop(rank, None)
        self.send(messages.StartRank(rank))
        with self._changed:
            if not self._changed.wait_for(lambda: rank in self._pids or self._link is None, _STARTING_S):
                raise RankLostError(f"host {self.node} did not start rank {rank} within {_STARTING_S:g} s")
            if rank not in self._pids:
                raise RankLostError(f"host {self.node} has hung up")
            self._processes[rank] = process = _RemoteProcess(rank, self._pids[rank], self, hear)
            self._changed.notify_all()
        return process

    def tell(self, message: bytes) -> None:
        """Do what `LocalHost` does."""
        self.send(messages.TellRank(None, message))

    def life(self, rank: int) -> Life:
        """Do what `LocalHost` does."""
        return self.pulse.get(rank, _NO_LIFE)[0]

    def end(self) -> None:
        """Do what `LocalHost` does; a host that takes nothing meanwhile is cut off."""
        timer = _after(_KILLING_S, self.drop)
        self.send(messages.EndEpoch())
        timer.cancel()

    def begin_again(self) -> None:
        """Do what `LocalHost` does."""
        self.send(messages.BeginEpoch())

    def send(self, message: messages.ToNode) -> None:
        """Send a message; a missing peer is noticed when its ranks end."""
        if (link := self._link) is not None:
            with contextlib.suppress(OSError):
                link.send(msgspec.msgpack.encode(message))

    def drop(self) -> None:
        """Cut the host off: what runs there has ended as far as the group is concerned."""
        if (link := self._link) is not None:
            link.close()

    def close(self) -> None:
        """Disconnect the host, and make threads that wait for it fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.drop()

    def _receive(self, link: Link) -> None:
        problem = "is gone"
        try:
            while (message := link.receive(messages.FROM_NODE)) is not None:
                self._take(message)
        except LinkError as error:
            problem = f"is not heard any more: {error}"
        link.close()
        with self._changed:
            self._link = None
            self._changed.notify_all()
        for process in list(self._processes.values()):
            process.end(f"{process.name} is lost: the host {problem}")

    def _take(self, message: messages.FromNode) -> None:
        if isinstance(message, messages.Pulse):
            for beat in message.beats:
                self.pulse[beat.rank] = Life(beat.ticks, beat.step, beat.loads), beat.is_starved
            self.is_busy, self._heard = message.is_busy, time.monotonic()
            return
        if isinstance(message, messages.Started):
            with self._changed:
                self._pids[message.rank] = message.pid
                self._changed.notify_all()
            return
        # A process's first message may arrive before the thread that started it knows of it.
        with self._changed:
            self._changed.wait_for(lambda: self._process(message.rank, message.pid) is not None, _KILLING_S)
            process = self._process(message.rank, message.pid)
        if process is None:
            return
        if isinstance(message, messages.Said):
            process.hear(process, message.reply)
        else:
            assert isinstance(message, messages.Ended)
            process.end(message.epitaph)

    def _process(self, rank: int, pid: int) -> _RemoteProcess | None:
        process = self._processes.get(rank)
        return process if process is not None and process.pid == pid else None


def _after(seconds: float, do: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, do)
    timer.daemon = True
    timer.start()
    return timer


class Remote:
    """All other hosts, and what ranks meet by."""

    def __init__(self, address: str, port: int, token: str, nnodes: int) -> None:
        """Listen at an address of this host, and at no other; `OSError` if it cannot be used."""
        self.hosts = {node: RemoteHost(node) for node in range(1, nnodes)}
        self.address = address
        self._store: TCPStore | None = None
        self._listener = LinkListener(address, port, token, self._admit)
        self.port = self._listener.port

    def new_store(self) -> str:
        """Return what ranks meet by next."""
        name, self._store = serve_store(self.address)
        return name

    def refuse(self, problem: str) -> None:
        """Tell all hosts why the group does not start."""
        for host in self.hosts.values():
            host.send(messages.Goodbye(problem))

    def close(self) -> None:
        """Let the hosts go."""
        self._listener.close()
        for host in self.hosts.values():
            host.close()

    def _admit(self, node: int, link: Link) -> bool:
        return node in self.hosts and self.hosts[node].attach(link)
