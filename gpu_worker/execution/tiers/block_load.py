"""One load of contents from lower tiers onto the device: several threads do it, and the scheduler ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gpu_worker.core.tiers import Wanted


class BlockLoad:
    """What `gpu_worker.core.tiers.Load` says.

    Attributes:
        salt: Of the sequences that the contents belong to.
        marks: By group, behind what blocks may be written to.
        num_ended: Contents that have arrived, or were found unusable.
    """

    def __init__(self, salt: bytes, wanted: list[Wanted], marks: list[object]) -> None:
        self.salt = salt
        self.marks = marks
        self._wanted = wanted
        self._arrived = [False] * len(wanted)
        self._num_taken = 0
        self.num_ended = 0
        self._has_ended = False
        self._lock = threading.Lock()

    def take(self) -> tuple[int, Wanted] | None:
        """Return the next content to load, and its number; None when there is no more to do."""
        with self._lock:
            if self._has_ended or self._num_taken == len(self._wanted):
                return None
            self._num_taken += 1
            return self._num_taken - 1, self._wanted[self._num_taken - 1]

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is wanted any more."""
        return self._has_ended

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
            self.num_ended += 1

    def end(self) -> list[bool]:
        """Stop, and say of each wanted content whether it arrived whole. No block is written to from now on."""
        with self._lock:
            self._has_ended = True
            return self._arrived
