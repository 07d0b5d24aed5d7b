"""A bounded queue in front of a few threads, shared fairly: owners take turns, piece by piece.

So an owner with a thousand texts delays itself only. The event loop hands each idle thread one piece; until then, a
piece whose owner has gone is dropped. A full lane refuses with a time to come back. How much may wait is
bounded in bytes, and in seconds by the measured rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shared.errors import HeadraceError

Result = TypeVar("Result")

# Bytes a second, before anything was measured; a slow tokenizer on a busy core.
_FIRST_RATE = 500_000.0
# What a piece costs beside its bytes, as bytes: small pieces must not make the lane look slow.
_PIECE_BYTES = 1024
# How much of the work measured so far still counts at the next piece.
_MEASURED_KEPT = 0.8
# About a tenth of a core beside a busy thread. At the lowest priority, 19, it is a hundredth: then a long conversation
# is not counted within ten seconds on a host without an idle core.
_LOW_PRIORITY = 10


class LaneBusyError(HeadraceError):
    """The lane is full; in `retry_after_s` seconds about a quarter of what waits has been done."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"The tokenizer is busy. Try again in {max(1.0, retry_after_s):.0f} s.")
        self.retry_after_s = max(1.0, retry_after_s)


@dataclass(slots=True, eq=False)
class _Piece:
    size: int
    work: Callable[[], Any]
    is_wanted: Callable[[], bool]
    done: asyncio.Future[Any]


class FairLane:
    """Owns its threads and its queue. Used from one event loop."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_bytes: int | None = None,
        max_wait_s: float = math.inf,
        *,
        yields: bool = False,
        stack_bytes: int = 0,
    ) -> None:
        """Prepare the threads; they start with the first work.

        Args:
            name: Of the threads.
            num_threads: How many pieces are worked on at once.
            max_bytes: How much may wait, half of it of one owner; None sets no bound.
            max_wait_s: How long that may take at the measured rate, which a slow machine makes the tighter bound.
            yields: The threads run at a low priority, where the system has priorities for threads.
            stack_bytes: Stack of each thread; 0 for that of the system.
        """
        self._pool = ThreadPoolExecutor(num_threads, name, initializer=_yield_to_others if yields else None)
        self._stack_bytes = stack_bytes
        self._num_idle = num_threads
        self._num_threads = num_threads
        self._max_bytes = max_bytes
        self._max_wait_s = max_wait_s
        # The first owner is next.
        self._queues: dict[str, deque[_Piece]] = {}
        self._waiting_bytes: dict[str, int] = {}
        # Of one thread, lately.
        self._measured_bytes, self._measured_s = _FIRST_RATE, 1.0

    async def run(
        self, owner: str, size: int, work: Callable[[], Result], is_wanted: Callable[[], bool] = lambda: True
    ) -> Result:
        """Return the result of `work`, which runs in a thread, maybe beside other work, when it is this owner's turn.

        Raises:
            LaneBusyError: Too much waits already; `size` is the bytes of this text.
            asyncio.CancelledError: `is_wanted` was False when its turn came.
        """
        self._check_room(owner, size)
        piece = _Piece(size, work, is_wanted, asyncio.get_running_loop().create_future())
        self._queues.setdefault(owner, deque()).append(piece)
        self._waiting_bytes[owner] = self._waiting_bytes.get(owner, 0) + size
        self._begin()
        result: Result = await piece.done
        return result

    def close(self) -> None:
        """End the threads; what has not begun is cancelled."""
        for queue in self._queues.values():
            for piece in queue:
                piece.done.cancel()
        self._queues.clear()
        self._waiting_bytes.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_room(self, owner: str, size: int) -> None:
        if self._max_bytes is None:
            return
        total, own = sum(self._waiting_bytes.values()), self._waiting_bytes.get(owner, 0)
        rate = self._num_threads * self._measured_bytes / self._measured_s
        room = min(self._max_bytes, self._max_wait_s * rate)
        # One piece may always wait, whatever its size.
        if (total and total + size > room) or (own and own + size > room / 2):
            raise LaneBusyError(total / 4 / rate)

    def _begin(self) -> None:
        while self._num_idle and self._queues:
            owner, queue = next(iter(self._queues.items()))
            piece = queue.popleft()
            del self._queues[owner]
            if queue:
                self._queues[owner] = queue
                self._waiting_bytes[owner] -= piece.size
            else:
                del self._waiting_bytes[owner]
            if piece.done.done():
                continue
            if not piece.is_wanted():
                piece.done.cancel()
                continue
            self._num_idle -= 1
            started = time.monotonic()
            # The pool starts a thread for its first pieces.
            before = threading.stack_size(self._stack_bytes)
            running = asyncio.get_running_loop().run_in_executor(self._pool, piece.work)
            threading.stack_size(before)
            running.add_done_callback(partial(self._finish, piece, started))

    def _finish(self, piece: _Piece, started: float, running: asyncio.Future[Any]) -> None:
        self._num_idle += 1
        elapsed_s = time.monotonic() - started
        self._measured_bytes = _MEASURED_KEPT * self._measured_bytes + piece.size + _PIECE_BYTES
        self._measured_s = _MEASURED_KEPT * self._measured_s + elapsed_s
        error = None if running.cancelled() else running.exception()
        if running.cancelled():
            piece.done.cancel()
        elif piece.done.done():
            pass  # The caller no longer waits.
        elif error is not None:
            piece.done.set_exception(error)
        else:
            piece.done.set_result(running.result())
        self._begin()


def _yield_to_others() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
