"""Replies of ranks, delivered to the thread that waits, and tasks of ranks beside steps and between them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import TypeVar

from gpu_worker.execution.ranks.member import TICK_S
from gpu_worker.execution.ranks.messages import Done, Hello, Ready, Reply
from gpu_worker.execution.ranks.process import RankProcess
from shared.errors import HeadraceError

T = TypeVar("T")


class RankLostError(HeadraceError):
    """A rank is gone."""


class RankProblemError(HeadraceError):
    """A rank could not do a task, which harms nothing else."""


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
        """Make the waiting thread fail."""
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


def wait_for_next(queue: SimpleQueue[T], check: Callable[[], object]) -> T:
    """Return what comes next; `check` raises when nothing will."""
    while True:
        check()
        with contextlib.suppress(Empty):
            return queue.get(timeout=TICK_S)


class RankTasks:
    """What the other ranks do and rank 0 waits for, each under a number of its own. Any thread may call it."""

    def __init__(self, send: Callable[[bytes], object], check: Callable[[], object], num_others: int) -> None:
        """Tell all other ranks by `send`; `check` fails when they will not answer any more."""
        self._send = send
        self._check = check
        self._num_others = num_others
        self._numbers = itertools.count(1)
        self._done: dict[int, SimpleQueue[tuple[int, str | None]]] = {}

    def new_number(self) -> int:
        """Return a number that ranks were given nothing under yet."""
        return next(self._numbers)

    def do(self, number: int, messages: Iterable[bytes], *, pauses: bool = False) -> None:
        """Send all other ranks what they are to do under a number, and wait until they have.

        Args:
            number: The last message has it, and is answered by `Done`.
            messages: Encoded.
            pauses: Wait after each message as long as it took, so that the plans of steps come between them.

        Raises:
            RankLostError: The group is lost.
            RankProblemError: A rank could not.
        """
        done = self._done[number] = SimpleQueue()
        try:
            for message in messages:
                self._check()
                began = time.monotonic()
                self._send(message)
                if pauses:
                    time.sleep(time.monotonic() - began)
            found = sorted(wait_for_next(done, self._check) for _ in range(self._num_others))
        finally:
            del self._done[number]
        for rank, problem in found:
            if problem is not None:
                raise RankProblemError(f"rank {rank}: {problem}")

    def put(self, rank: int, answer: Done) -> None:
        """Take a rank's answer; the waiting thread may have given up."""
        if (done := self._done.get(answer.number)) is not None:
            done.put((rank, answer.problem))
