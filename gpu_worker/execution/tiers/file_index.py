"""Index of a store of files, and the choice of files to delete when they are too many.

The content is deleted that costs least to recompute, in tokens a byte, plus the priority of the last one deleted before
it was used: so unused ones age. Retained files come behind all others in the heap.
Source: Cao and Irani, Cost-Aware WWW Proxy Caching Algorithms, 1997 (GreedyDual-Size).
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from gpu_worker.core.retention import Retention
from gpu_worker.execution.tiers.file_store import StoredFile

_MIN_COMPACTED = 64


@dataclass(slots=True)
class _Entry:
    """A file; among those of one priority the lowest `number` goes first."""

    num_bytes: int
    priority: float
    number: int
    added_at: float


class FileIndex:
    """Several threads use it."""

    def __init__(
        self, tokens_of: Callable[[str], int], retained_bytes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Index nothing yet.

        Args:
            tokens_of: Says how many tokens are computed for a kind, the key's folder and group.
            retained_bytes: Of files that may be retained.
            clock: Tells the time until which they are.
        """
        self._tokens_of = tokens_of
        self._retention = Retention(retained_bytes)
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        # Whether it is retained, priority, number, key. Items that are not true any more stay until they are popped.
        self._heap: list[tuple[bool, float, int, str]] = []
        self._folders: dict[str, set[str]] = {}
        self._last_priority = 0.0
        self._num_uses = 0
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def retained_bytes(self) -> int:
        """Of the files that are deleted last at present, those that are being written included."""
        return int(self._retention.used)

    def add(self, key: str, num_bytes: int) -> None:
        """Add a file that was written."""
        with self._lock:
            self._remove(key, is_gone=False)
            self._add(key, num_bytes)

    def touch(self, key: str) -> None:
        """Take note that a file was used."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._use(key, entry)

    def remove(self, key: str) -> int:
        """Take out a file that is gone, and return its bytes; 0 if it is not here."""
        with self._lock:
            return self._remove(key)

    def renew(self, folder: str, files: Mapping[str, StoredFile], listed_at: float) -> None:
        """Take over what a folder was seen to have."""
        with self._lock:
            known = self._folders.setdefault(folder, set())
            for key in known - files.keys():
                if self._entries[key].added_at < listed_at:
                    self._remove(key)
            for key in known & files.keys():
                entry = self._entries[key]
                if entry.num_bytes != files[key].num_bytes:
                    self.num_bytes += files[key].num_bytes - entry.num_bytes
                    entry.num_bytes = files[key].num_bytes
                    self._use(key, entry)
            for key in sorted(files.keys() - known, key=lambda new: files[new].modified):
                self._add(key, files[key].num_bytes)

    def retain(self, tenant: str, weight: float, keys: Iterable[str], until: float, num_bytes: int) -> None:
        """Delete files last, until a time, as far as the tenant's quota goes; some may yet have to be written."""
        with self._lock:
            self._expire()
            self._retain_no_longer(self._retention.retain(tenant, weight, map(str.encode, keys), until, num_bytes))

    def spend(self, keys: Iterable[str]) -> None:
        """Delete files before others, the last first: they come in the order of a prefix."""
        with self._lock:
            for key in keys:
                self._retention.discard(key.encode())
                if (entry := self._entries.get(key)) is not None:
                    self._num_uses += 1
                    entry.priority, entry.number = -inf, -self._num_uses
                    self._push(key, entry)

    def pop_cheapest(self) -> tuple[str, int] | None:
        """Take out the file that is missed least, and return its key and bytes; None where there is none."""
        with self._lock:
            self._expire()
            while self._heap:
                was_retained, priority, number, key = heapq.heappop(self._heap)
                entry = self._entries.get(key)
                if entry is None or (entry.priority, entry.number) != (priority, number):
                    continue
                if was_retained == (key.encode() in self._retention):
                    self._last_priority = max(self._last_priority, priority)
                    return key, self._remove(key)
                if not was_retained:
                    self._push(key, entry)
            return None

    def _expire(self) -> None:
        self._retain_no_longer(self._retention.expire(self._clock()))

    def _retain_no_longer(self, let_go: Iterable[bytes]) -> None:
        for digest in let_go:
            if (entry := self._entries.get(key := digest.decode())) is not None:
                self._push(key, entry)

    def _use(self, key: str, entry: _Entry) -> None:
        """Give a file the priority of one that is used now."""
        self._num_uses += 1
        entry.number = self._num_uses
        entry.priority = self._last_priority + self._tokens_of(_kind(key)) / max(1, entry.num_bytes)
        self._push(key, entry)

    def _push(self, key: str, entry: _Entry) -> None:
        heapq.heappush(self._heap, self._item(key, entry))
        if len(self._heap) > 2 * len(self._entries) + _MIN_COMPACTED:
            self._heap = [self._item(*pair) for pair in self._entries.items()]
            heapq.heapify(self._heap)

    def _item(self, key: str, entry: _Entry) -> tuple[bool, float, int, str]:
        return key.encode() in self._retention, entry.priority, entry.number, key

    def _add(self, key: str, num_bytes: int) -> None:
        entry = self._entries[key] = _Entry(num_bytes, 0.0, 0, time.monotonic())
        self._use(key, entry)
        self._folders.setdefault(key.rpartition("/")[0], set()).add(key)
        self.num_bytes += num_bytes

    def _remove(self, key: str, *, is_gone: bool = True) -> int:
        entry = self._entries.pop(key, None)
        if entry is None:
            return 0
        if is_gone:
            self._retention.discard(key.encode())
        self._folders[key.rpartition("/")[0]].discard(key)
        self.num_bytes -= entry.num_bytes
        return entry.num_bytes


def _kind(key: str) -> str:
    return key.rsplit("/", 2)[0]
