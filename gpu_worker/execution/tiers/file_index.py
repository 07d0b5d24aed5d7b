"""Index of a store of files, and the choice of files to delete when they are too many.

The content is deleted that costs least to recompute, in tokens a byte, plus the priority of the last one deleted before
it was used: so unused ones age. All files of one kind cost the same, so each kind has an order of its own, and the
oldest of each are compared. Retained contents are passed over.
Source: Cao and Irani, Cost-Aware WWW Proxy Caching Algorithms, 1997 (GreedyDual-Size).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from gpu_worker.core.retention import Retention
from gpu_worker.execution.tiers.file_store import StoredFile

_MAX_PASSED = 64
"""Retained files of a kind that one search passes over."""


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    base: float
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
        self._kinds: dict[str, OrderedDict[str, _Entry]] = {}
        self._folders: dict[str, set[str]] = {}
        self._last_priority = 0.0
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._kinds.get(_kind(key), ())

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
            entries = self._kinds.get(_kind(key), OrderedDict())
            if (entry := entries.get(key)) is not None:
                entries.move_to_end(key)
                entry.base = self._last_priority

    def remove(self, key: str) -> int:
        """Take out a file that is gone, and return its bytes; 0 if it is not here."""
        with self._lock:
            return self._remove(key)

    def renew(self, folder: str, files: Mapping[str, StoredFile], listed_at: float) -> None:
        """Take over what a folder was seen to have."""
        with self._lock:
            known = self._folders.setdefault(folder, set())
            for key in known - files.keys():
                if self._kinds[_kind(key)][key].added_at < listed_at:
                    self._remove(key)
            for key in known & files.keys():
                entry = self._kinds[_kind(key)][key]
                self.num_bytes += files[key].num_bytes - entry.num_bytes
                entry.num_bytes = files[key].num_bytes
            for key in sorted(files.keys() - known, key=lambda new: files[new].modified):
                self._add(key, files[key].num_bytes)

    def retain(self, tenant: str, weight: float, keys: Iterable[str], until: float, num_bytes: int) -> None:
        """Delete files last, until a time, as far as the tenant's quota goes; some may yet have to be written."""
        with self._lock:
            self._retention.expire(self._clock())
            self._retention.retain(tenant, weight, map(str.encode, keys), until, num_bytes)

    def spend(self, keys: Iterable[str]) -> None:
        """Delete files before others."""
        with self._lock:
            for key in keys:
                self._retention.discard(key.encode())
                entries = self._kinds.get(_kind(key), OrderedDict())
                if (entry := entries.get(key)) is not None:
                    entries.move_to_end(key, last=False)
                    entry.base = -inf

    def pop_cheapest(self) -> tuple[str, int] | None:
        """Take out the file that is missed least, and return its key and bytes; None where there is none."""
        with self._lock:
            self._retention.expire(self._clock())
            heads: list[tuple[bool, float, str]] = []
            for kind, entries in self._kinds.items():
                if entries:
                    entry = entries[key := self._head(entries)]
                    priority = entry.base + self._tokens_of(kind) / max(1, entry.num_bytes)
                    heads.append((key.encode() in self._retention, priority, key))
            if not heads:
                return None
            _, priority, key = min(heads)
            self._last_priority = max(self._last_priority, priority)
            return key, self._remove(key)

    def _head(self, entries: OrderedDict[str, _Entry]) -> str:
        """Return the oldest file of a kind; retained ones before it become the youngest."""
        for _ in range(_MAX_PASSED):
            key = next(iter(entries))
            if key.encode() not in self._retention:
                break
            entries.move_to_end(key)
            entries[key].base = self._last_priority
        return next(iter(entries))

    def _add(self, key: str, num_bytes: int) -> None:
        entries = self._kinds.setdefault(_kind(key), OrderedDict())
        entries[key] = _Entry(num_bytes, self._last_priority, time.monotonic())
        self._folders.setdefault(key.rpartition("/")[0], set()).add(key)
        self.num_bytes += num_bytes

    def _remove(self, key: str, *, is_gone: bool = True) -> int:
        entry = self._kinds.get(_kind(key), OrderedDict()).pop(key, None)
        if entry is None:
            return 0
        if is_gone:
            self._retention.discard(key.encode())
        self._folders[key.rpartition("/")[0]].discard(key)
        self.num_bytes -= entry.num_bytes
        return entry.num_bytes


def _kind(key: str) -> str:
    return key.rsplit("/", 2)[0]
