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
        *,
        needs_all: bool = True,
    ) -> dict[int, Hello | Ready]:
        """Return what each of these ranks says: a `kind`, of this epoch if it tells one.

        Args:
            processes: Of the ranks.
            kind: Of the answer.
            timeout_s: None waits for as long as it takes.
            epoch: Of `Ready`.
            needs_all: Fail for a rank that ends or is silent; else it is left out.

        Raises:
            RankLostError: One that is needed ends, or says nothing in time, or the worker ends.
        """
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
        if missing and needs_all:
            raise RankLostError(f"rank {', '.join(map(str, sorted(missing)))} did not answer within {timeout_s:g} s")
        return found
