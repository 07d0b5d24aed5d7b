"""Loads contents to the device in threads of their own, which may wait for a disk as long as they like."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from gpu_worker.core.tiers import Wanted

Fetch = Callable[[Wanted, "BlockLoad"], None]


class BlockLoad:
    """What `gpu_worker.core.tiers.Load` says.

    Attributes:
        salt: Of the sequences that the contents belong to.
        marks: By group, behind what blocks may be written to.
    """

    def __init__(self, salt: bytes, wanted: list[Wanted], marks: list[object]) -> None:
        self.salt = salt
        self.marks = marks
        self._wanted = wanted
        self._arrived = [False] * len(wanted)
        self._num_taken = 0
        self._num_ended = 0
        self._has_ended = self._was_left = False
        self._lock = threading.Lock()

    @property
    def num_ended(self) -> int:
        """Contents that have arrived, or were found unusable."""
        return self._num_ended

    def take(self) -> tuple[int, Wanted] | None:
        """Return the next content to load, and its number; None when there is no more to do."""
        with self._lock:
            if self._has_ended or self._num_taken == len(self._wanted):
                return None
            self._num_taken += 1
            return self._num_taken - 1, self._wanted[self._num_taken - 1]

    def write(self, number: int, write: Callable[[], None]) -> bool:
        """Let a content be written, unless the load was ended meanwhile: then its block belongs to others."""
        with self._lock:
            if self._has_ended:
                return False
            write()
            self._arrived[number] = True
            return True

    def note_ended(self) -> None:
        """Take note that a content has arrived, or does not come."""
        with self._lock:
            self._num_ended += 1

    def leave(self) -> list[Wanted] | None:
        """Return what was wanted, once: to who ends last, when nothing is under way or begun any more."""
        with self._lock:
            has_more = not self._has_ended and self._num_taken < len(self._wanted)
            if has_more or self._num_ended < self._num_taken or self._was_left:
                return None
            self._was_left = True
            return self._wanted

    def end(self) -> list[bool]:
        """Stop, and say of each wanted content whether it arrived whole. No block is written to from now on."""
        with self._lock:
            self._has_ended = True
            return self._arrived


class Loader:
    """Threads that do one load after another, several at once. They end with the process."""

    def __init__(self, num_threads: int, run: Callable[[BlockLoad], None]) -> None:
        self._run = run
        self._queue: SimpleQueue[BlockLoad] = SimpleQueue()
        self._num_threads = num_threads
        for number in range(num_threads):
            threading.Thread(target=self._work, name=f"kv-load-{number}", daemon=True).start()

    def add(self, load: BlockLoad) -> None:
        """Do a load."""
        for _ in range(self._num_threads):
            self._queue.put(load)

    def _work(self) -> None:
        while True:
            self._run(self._queue.get())
