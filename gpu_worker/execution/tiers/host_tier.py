"""Contents of blocks in the host's memory, a fixed number of rows for each group.

Several threads read it. A pinned row is being read, and stays as it is: meanwhile it is not in the order of evictions,
so that a search for a row does not walk past those of others' leases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Values
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from mmap import PAGESIZE
from typing import NamedTuple

from gpu_worker.core.eviction_order import EvictionOrder
from gpu_worker.core.retention import Retention
from gpu_worker.execution.memory.block_bytes import BlockBytes, Bytes, Copy
from gpu_worker.execution.tiers.shared_memory import make_shared
from shared.errors import ConfigError


class Kept(NamedTuple):
    """A content that was taken over: it can be pinned once its copy is done."""

    group: int
    digest: bytes
    salt: bytes


_TOUCHED_FIRST_BYTES = 64 << 20
_TOUCHED_AT_ONCE_BYTES = 8 << 20


@dataclass(slots=True, eq=False)
class HeldRow:
    """A row in use."""

    row: int
    num_pins: int = 0
    is_filled: bool = False
    goes_first: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Contents on their way to their rows."""

    copy: Copy
    taken: list[tuple[Kept, HeldRow]]


class HostTier:
    """Rows of all groups.

    Attributes:
        stored_bytes: Copied to rows so far.
        num_dropped: Contents that were not kept, because all rows were in use.
        num_evicted: Contents that made room for others.
        file: What the rows are in, for other processes to read; None if they are not shared.
    """

    def __init__(
        self,
        groups: Values[BlockBytes],
        num_bytes: int,
        retained_share: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_shared: bool = False,
    ) -> None:
        """Divide `num_bytes` among groups as the device's memory is.

        Args:
            groups: The groups of blocks that are kept.
            num_bytes: In all.
            retained_share: Of each group's rows, which may be retained.
            clock: Tells the time until which they are.
            is_shared: Other processes of this host and user may read all rows, where the system has memory for that.

        Raises:
            ConfigError: A group would have no row.
        """
        self._groups = groups
        counts = _num_rows(groups, num_bytes)
        sizes = [count * group.row_bytes for count, group in zip(counts, groups, strict=True)]
        begins = list(accumulate((-(-size // PAGESIZE) * PAGESIZE for size in sizes), initial=0))
        self.file: int | None
        self.file, memory = (make_shared(begins[-1]) if is_shared else None) or (None, None)
        self._shared_at = 0 if memory is None else memory.ctypes.data
        self._rows = [
            group.make_rows(count, None if memory is None else memory[begin : begin + size])
            for group, count, begin, size in zip(groups, counts, begins, sizes, strict=False)
        ]
        self._free: list[list[int]] = [[] for _ in groups]
        self._entries: list[dict[bytes, HeldRow]] = [{} for _ in groups]
        self._orders = [EvictionOrder(Retention(int(count * retained_share))) for count in counts]
        self._clock = clock
        self._lock = threading.Lock()
        self.num_bytes = sum(rows.nbytes for rows in self._rows)
        self.stored_bytes = self.num_dropped = self.num_evicted = 0
        self._num_touched = [0] * len(groups)
        self._touch(_TOUCHED_FIRST_BYTES)
        threading.Thread(target=self._touch, name="kv-touch", daemon=True).start()

    @property
    def used_bytes(self) -> int:
        """Memory of the rows that are in use."""
        pairs = zip(self._entries, self._groups, strict=True)
        return sum(len(entries) * group.row_bytes for entries, group in pairs)

    @property
    def retained_bytes(self) -> int:
        """Memory of the rows that are evicted last at present."""
        pairs = zip(self._orders, self._groups, strict=True)
        return sum(len(order.retention) * group.row_bytes for order, group in pairs)

    @property
    def regions(self) -> list[tuple[int, int]]:
        """Addresses and sizes of the memory in which the rows are."""
        return [(rows.ctypes.data, rows.nbytes) for rows in self._rows if rows.nbytes]

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether the content is there, and make it the most recently used."""
        with self._lock:
            entries = self._entries[group]
            entry = entries.get(digest)
            if entry is None:
                return False
            if entry.num_pins == 0:
                self._orders[group].touch(digest)
            entry.goes_first = False
            return entry.is_filled

    def knows(self, group: int, digest: bytes) -> bool:
        """Return whether the content is there, or on its way."""
        return digest in self._entries[group]

    def keep(self, group: int, contents: Values[tuple[int, bytes, bytes]]) -> Batch | None:
        """Begin to copy blocks of a group: block, digest and salt of each, none of which is known.

        Those before others in a prefix come first, and are evicted after them. Nothing can be read before `settle`.
        """
        taken: list[tuple[Kept, HeldRow]] = []
        blocks = []
        with self._lock:
            for block, digest, salt in contents:
                row = self._take(group)
                if row is None:
                    self.num_dropped += 1
                    continue
                # Pinned by the copy.
                entry = self._entries[group][digest] = HeldRow(row, num_pins=1)
                taken.append((Kept(group, digest, salt), entry))
                blocks.append(block)
        if not taken:
            return None
        self.stored_bytes += len(taken) * self._groups[group].row_bytes
        copy = self._groups[group].read(blocks, self._rows[group], [entry.row for _, entry in taken])
        return Batch(copy, taken)

    def settle(self, batch: Batch) -> list[Kept]:
        """Make contents readable whose copies are done, and return them, but for those that were forgotten."""
        landed: list[Kept] = []
        with self._lock:
            for kept, entry in reversed(batch.taken):
                if self._entries[kept.group].get(kept.digest) is entry:
                    entry.is_filled = True
                    landed.append(kept)
                self._unpin(kept.group, kept.digest, entry)
        return landed[::-1]

    @contextmanager
    def pinned(self, group: int, digest: bytes) -> Iterator[Bytes | None]:
        """Give the row of a content, which stays as it is meanwhile; None where it is not there."""
        with self._lock:
            entry = self._entries[group].get(digest)
            entry = entry if entry is not None and entry.is_filled else None
            if entry is not None:
                self._pin(group, digest, entry)
        if entry is None:
            yield None
            return
        try:
            yield self._rows[group][entry.row]
        finally:
            with self._lock:
                self._unpin(group, digest, entry)

    def hold(self, digests: Iterable[bytes]) -> dict[tuple[int, bytes], HeldRow]:
        """Keep the rows of contents, in all groups, until `let_go`: as many as are there, or on their way."""
        held: dict[tuple[int, bytes], HeldRow] = {}
        with self._lock:
            for digest in digests:
                for group, entries in enumerate(self._entries):
                    if (entry := entries.get(digest)) is not None and (group, digest) not in held:
                        self._pin(group, digest, entry)
                        held[group, digest] = entry
        return held

    def let_go(self, held: dict[tuple[int, bytes], HeldRow]) -> None:
        """Let rows be used again that `hold` has kept."""
        with self._lock:
            for (group, digest), entry in held.items():
                self._unpin(group, digest, entry)

    def place(self, row: Bytes) -> int:
        """Return where in `file` a row is."""
        return row.ctypes.data - self._shared_at

    def num_bytes_of(self, held: Iterable[tuple[int, bytes]]) -> int:
        """Return the bytes of contents."""
        return sum(self._groups[group].row_bytes for group, _ in held)

    def is_current(self, group: int, digest: bytes, row: Bytes) -> bool:
        """Return whether a content that is pinned has not been forgotten."""
        entry = self._entries[group].get(digest)
        return entry is not None and self._rows[group][entry.row].ctypes.data == row.ctypes.data

    def forget(self, digests: Iterable[bytes]) -> None:
        """Drop contents, in all groups."""
        with self._lock:
            for digest in digests:
                for group, entries in enumerate(self._entries):
                    entry = entries.pop(digest, None)
                    if entry is not None:
                        self._orders[group].retention.discard(digest)
                        if entry.num_pins == 0:
                            self._orders[group].remove(digest)
                            self._free[group].append(entry.row)

    def retain(self, tenant: str, weight: float, digests: Values[bytes], until: float) -> None:
        """Evict contents last, in all groups, until a time, as far as the tenant's quota goes."""
        with self._lock:
            for order, entries in zip(self._orders, self._entries, strict=True):
                order.expire(self._clock())
                found = [digest for digest in digests if digest in entries]
                order.retain(tenant, weight, found, until)
                for digest in found:
                    entries[digest].goes_first &= digest not in order.retention

    def spend(self, digests: Values[bytes]) -> None:
        """Evict contents before others, in all groups."""
        with self._lock:
            for order, entries in zip(self._orders, self._entries, strict=True):
                order.spend(digests)
                for digest in digests:
                    if (entry := entries.get(digest)) is not None and entry.num_pins:
                        entry.goes_first = True

    def _pin(self, group: int, digest: bytes, entry: HeldRow) -> None:
        if entry.num_pins == 0:
            self._orders[group].remove(digest)
        entry.num_pins += 1

    def _unpin(self, group: int, digest: bytes, entry: HeldRow) -> None:
        entry.num_pins -= 1
        if entry.num_pins:
            return
        if self._entries[group].get(digest) is entry:
            self._orders[group].add(digest, goes_first=entry.goes_first)
            entry.goes_first = False
        else:
            self._free[group].append(entry.row)

    def _touch(self, num_bytes: int | None = None) -> None:
        """Let rows be used whose memory the system has given: a copy to others would take sixteen times as long."""
        for group, rows in enumerate(self._rows):
            row_bytes = self._groups[group].row_bytes
            step = max(1, _TOUCHED_AT_ONCE_BYTES // max(1, row_bytes))
            end = len(rows) if num_bytes is None else min(len(rows), 1 + num_bytes // max(1, row_bytes))
            while (first := self._num_touched[group]) < end:
                last = min(end, first + step)
                rows[first:last] = 0
                with self._lock:
                    self._free[group] += range(first, last)
                self._num_touched[group] = last

    def _take(self, group: int) -> int | None:
        if self._free[group]:
            return self._free[group].pop()
        entries, order = self._entries[group], self._orders[group]
        order.expire(self._clock())
        digest = order.pop()
        if digest is None:
            return None
        self.num_evicted += 1
        return entries.pop(digest).row


def _num_rows(groups: Values[BlockBytes], num_bytes: int) -> list[int]:
    device_bytes = sum(group.num_blocks * group.row_bytes for group in groups)
    counts = [group.num_blocks * num_bytes // max(1, device_bytes) if group.row_bytes else 0 for group in groups]
    if any(count == 0 for count, group in zip(counts, groups, strict=True) if group.row_bytes):
        least = max(-(-device_bytes // group.num_blocks) for group in groups if group.row_bytes)
        raise ConfigError("HEADRACE_KV_HOST_BYTES", f"is {num_bytes}, which holds no block of each kind; {least} do")
    return counts
