"""Answers in this process's memory, in front of Redis: bounded in bytes, least recently used out first.

An answer is kept as Redis has it, and beside that, once a request for it was repeated, as it is told.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shared.messages import Delta

# What an entry takes beside its value: key, entry, numbers, and their places in the table.
ENTRY_BYTES = 300

Sequences = list[list[Delta]]


@dataclass(slots=True)
class _Entry:
    value: bytes
    expires_at: float
    num_bytes: int
    told: Sequences | None = None


class AnswerMemory:
    """Answers by the digest of their request. Holds at most `max_bytes`; with 0 it is always empty."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.num_bytes = 0

    def get(self, digest: bytes, now: float) -> bytes | None:
        """Return an answer whose time is not over. `now` is Unix seconds, here and below."""
        entry = self._current(digest, now)
        return None if entry is None else entry.value

    def told(self, digest: bytes, now: float) -> Sequences | None:
        """Return an answer as it is told, if `keep_told` has kept that."""
        entry = self._current(digest, now)
        return None if entry is None else entry.told

    def put(self, digest: bytes, value: bytes, expires_at: float) -> None:
        """Keep an answer until `expires_at`, or until others have been wanted more recently."""
        self.drop(digest)
        if len(value) + ENTRY_BYTES > self._max_bytes:
            return
        self._entries[digest] = _Entry(value, expires_at, len(value) + ENTRY_BYTES)
        self._add(len(value) + ENTRY_BYTES)

    def keep_told(self, digest: bytes, told: Sequences, num_bytes: int) -> None:
        """Keep an answer that is here as it is told too, which takes so many bytes, if there is room for both."""
        entry = self._entries.get(digest)
        if entry is None or entry.told is not None or entry.num_bytes + num_bytes > self._max_bytes:
            return
        entry.told = told
        entry.num_bytes += num_bytes
        self._entries.move_to_end(digest)
        self._add(num_bytes)

    def drop(self, digest: bytes) -> None:
        """Forget an answer, if it is there."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def _current(self, digest: bytes, now: float) -> _Entry | None:
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if entry.expires_at <= now:
            self.drop(digest)
            return None
        self._entries.move_to_end(digest)
        return entry

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))
