"""Encoded answers in this process's memory, in front of Redis: bounded in bytes, least recently used out first."""

from __future__ import annotations

import math
from collections import OrderedDict

# What an entry takes beside its value: key, tuple, number, and their places in the table.
ENTRY_BYTES = 300


class AnswerMemory:
    """Answers by the digest of their request. Holds at most `max_bytes`; with 0 it is always empty."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self.num_bytes = 0

    def get(self, digest: bytes, now: float) -> bytes | None:
        """Return an answer whose time is not over. `now` is Unix seconds, here and below."""
        found = self._entries.get(digest)
        if found is None:
            return None
        value, expires_at = found
        if expires_at <= now:
            self.drop(digest)
            return None
        self._entries.move_to_end(digest)
        return value

    def expires_at(self, digest: bytes) -> float:
        """Return when the time of an answer is over; -inf if it is not there."""
        return self._entries.get(digest, (b"", -math.inf))[1]

    def put(self, digest: bytes, value: bytes, expires_at: float) -> None:
        """Keep an answer until `expires_at`, or until others have been wanted more recently."""
        self.drop(digest)
        if len(value) + ENTRY_BYTES > self._max_bytes:
            return
        self._entries[digest] = (value, expires_at)
        self.num_bytes += len(value) + ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, digest: bytes) -> None:
        """Forget an answer, if it is there."""
        found = self._entries.pop(digest, None)
        if found is not None:
            self.num_bytes -= len(found[0]) + ENTRY_BYTES
