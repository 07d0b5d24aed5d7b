"""Tiers below the device's memory in virtual time: the host's, and files that all workers share.

Contents are digests alone. They are evicted by the classes that evict real ones. A load takes the time of its tokens
at the tier's rate; stores are instantaneous.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpu_worker.core.eviction_order import EvictionOrder
from gpu_worker.core.retention import Retention
from gpu_worker.core.tiers import FULL, Wanted
from gpu_worker.execution.tiers.file_index import FileIndex
from ops.simulation.engine import VirtualClock

_FILE_BYTES = 1


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Blocks in the host's memory of each worker, in the files of all, and how many a worker loads each second."""

    host_blocks: int
    file_blocks: int
    loads_per_s: float


class SharedFiles:
    """What all workers have stored."""

    def __init__(self, num_blocks: int, retained_share: float, clock: VirtualClock) -> None:
        self._num_blocks = num_blocks
        self.index = FileIndex(lambda kind: 1, num_blocks * retained_share, clock.time)

    def __contains__(self, digest: bytes) -> bool:
        return _key(digest) in self.index

    def add(self, digest: bytes) -> None:
        """Store a content, or take note that it is used."""
        if digest in self:
            self.index.touch(_key(digest))
            return
        self.index.add(_key(digest), _FILE_BYTES)
        while self.index.num_bytes > self._num_blocks:
            self.index.pop_cheapest()


@dataclass(frozen=True, slots=True)
class VirtualLoad:
    """What `gpu_worker.core.tiers.Load` says."""

    clock: VirtualClock
    since: float
    num_wanted: int
    loads_per_s: float

    @property
    def num_ended(self) -> int:
        """Contents that have arrived."""
        return min(self.num_wanted, int((self.clock.now - self.since) * self.loads_per_s))

    def end(self) -> list[bool]:
        """Say of each content whether it has arrived."""
        return [place < self.num_ended for place in range(self.num_wanted)]


class VirtualTiers:
    """What `gpu_worker.core.tiers.KvTiers` says, of one worker; models have one group of layers."""

    def __init__(self, sizes: TierSizes, retained_share: float, files: SharedFiles, clock: VirtualClock) -> None:
        self.prefill_rate = 0.0
        self._sizes = sizes
        self._files = files
        self._clock = clock
        self._host = EvictionOrder(Retention(sizes.host_blocks * retained_share))

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether the content is there, and take note that it is used."""
        if digest in self._host:
            self._host.touch(digest)
            return True
        return digest in self._files

    def pays(self, wanted: Iterable[tuple[int, bytes]], num_tokens: int) -> bool:
        """Compare the times of loading and of computing."""
        seconds = len(list(wanted)) / self._sizes.loads_per_s
        return not self.prefill_rate or seconds < num_tokens / self.prefill_rate

    def load(self, salt: bytes, wanted: list[Wanted]) -> VirtualLoad:
        """Begin to load."""
        for item in reversed(wanted):
            self.store(item.group, item.block, item.digest, salt)
        return VirtualLoad(self._clock, self._clock.now, len(wanted), self._sizes.loads_per_s)

    def store(self, group: int, block: int, digest: bytes, salt: bytes) -> None:
        """Keep a content."""
        assert group == FULL
        self._files.add(digest)
        self._host.expire(self._clock.now)
        if digest not in self._host and self._sizes.host_blocks:
            self._host.add(digest)
            if len(self._host) > self._sizes.host_blocks:
                self._host.pop()

    def evicted(self, block: int, digest: bytes) -> None:
        """Do nothing: it was stored when it was complete."""

    def flush(self) -> None:
        """Do nothing: nothing is copied."""

    def retain(self, tenant: str, weight: float, digests: Iterable[bytes], until: float) -> None:
        """Evict contents last, until a time."""
        digests = list(digests)
        self._host.retain(tenant, weight, [digest for digest in digests if digest in self._host], until)
        self._files.index.retain(tenant, weight, map(_key, digests), until, _FILE_BYTES)

    def spend(self, digests: Iterable[bytes]) -> None:
        """Evict contents before others."""
        digests = list(digests)
        self._host.spend(digests)
        self._files.index.spend(map(_key, digests))

    def forget(self, digests: Iterable[bytes]) -> None:
        """Do nothing: no content is wrong here."""

    def suspend(self) -> None:
        """Do nothing: no load hangs here."""


def _key(digest: bytes) -> str:
    return f"m/0/00/{digest.hex()}.kv"
