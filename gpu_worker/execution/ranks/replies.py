"""What ranks answer, as whoever waits for it gets it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from queue import Empty, SimpleQueue

from gpu_worker.execution.ranks.messages import Hello, Ready, Reply
from gpu_worker.execution.ranks.process import RankProcess
from shared.errors import HeadraceError


class RankLostError(HeadraceError):
    """A rank is gone."""


class Replies:
    """Any thread may put; one waits."""

    def __init__(self, processes: Mapping[int, RankProcess]) -> None:
        """Know nothing; who is not among `processes` any more is not heard."""
        self._processes = processes
        self._queue: SimpleQueue[tuple[RankProcess | None, Reply | None]] = SimpleQueue()

    def put(self, process: RankProcess, reply: Reply | None) -> None:
        """Add what a rank has said; None is its end."""
        self._queue.put((process, reply))

    def stop(self) -> None:
        """Let whoever waits fail."""
        self._queue.put((None, None))

    def wait(
        self,
        processes: Collection[RankProcess],
        kind: type[Hello | Ready],
        timeout_s: float | None,
        epoch: int | None = None,
    ) -> dict[int, Hello | Ready]:
        """Return what each of these ranks says: a `kind`, of this epoch if it tells one.

        Raises:
            RankLostError: Any rank ends, or one of these says nothing in time, or the worker ends.
        """
        found = self._collect(processes, kind, timeout_s, epoch, needs_all=True)
        if missing := [process.rank for process in processes if process.rank not in found]:
            names = ", ".join(map(str, missing))
            raise RankLostError(f"rank {names} did not answer within {timeout_s:g} s")
        return found

    def collect(
        self, processes: Collection[RankProcess], kind: type[Hello | Ready], timeout_s: float, epoch: int
    ) -> dict[int, Hello | Ready]:
        """Do the same for those that answer in time, and do not end.

        Raises:
            RankLostError: The worker ends.
        """
        return self._collect(processes, kind, timeout_s, epoch, needs_all=False)

    def _collect(
        self,
        processes: Collection[RankProcess],
        kind: type[Hello | Ready],
        timeout_s: float | None,
        epoch: int | None,
        *,
        needs_all: bool,
    ) -> dict[int, Hello | Ready]:
        missing, found = {process.rank for process in processes}, dict[int, Hello | Ready]()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while missing:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                process, reply = self._queue.get(timeout=left_s)
            except Empty:
                break
            if process is None:
                raise RankLostError("the worker ends")
            if self._processes.get(process.rank) is not process:
                continue
            if process.epitaph is not None:
                if needs_all:
                    raise RankLostError(process.epitaph)
                missing.discard(process.rank)
            elif isinstance(reply, kind) and (not isinstance(reply, Ready) or reply.epoch == epoch):
                found[process.rank] = reply
                missing.discard(process.rank)
        return found
