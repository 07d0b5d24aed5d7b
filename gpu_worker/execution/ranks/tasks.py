"""What the other ranks do beside steps and between them, and rank 0 waits for: each under a number of its own."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import TypeVar

from gpu_worker.execution.ranks.member import TICK_S
from gpu_worker.execution.ranks.messages import Done
from shared.errors import HeadraceError

T = TypeVar("T")


class RankProblemError(HeadraceError):
    """A rank could not do what it was told to, which harms nothing else."""


def wait_for_next(queue: SimpleQueue[T], check: Callable[[], object]) -> T:
    """Return what comes next; `check` raises when nothing will."""
    while True:
        check()
        with contextlib.suppress(Empty):
            return queue.get(timeout=TICK_S)


class RankTasks:
    """Any thread may call it."""

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
        """Take what a rank answers; whoever waited may have given up."""
        if (done := self._done.get(answer.number)) is not None:
            done.put((rank, answer.problem))
