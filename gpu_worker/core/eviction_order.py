"""The order in which contents of a cache are evicted: spent ones, the rest by last use, then retained ones.

A tier of any kind asks it for the next content to evict. Several digests are passed in prefix order and evicted from
the end, since content behind a gap in a prefix is useless.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from gpu_worker.core.retention import Retention

MAX_EXPIRED = 1024
"""Digests that one call no longer retains: some milliseconds."""

_ABSENT = object()


class EvictionOrder:
    """Digests of contents that may be evicted. Not thread safe.

    Attributes:
        retention: The contents that are evicted last; it may name contents that are not here at present.
    """

    def __init__(self, retention: Retention | None = None) -> None:
        """Start empty; without `retention` nothing is retained."""
        self.retention = Retention(0) if retention is None else retention
        self._ordinary: OrderedDict[bytes, object] = OrderedDict()
        self._retained: OrderedDict[bytes, object] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._retained)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._ordinary or digest in self._retained

    def __iter__(self) -> Iterator[bytes]:
        yield from self._ordinary
        yield from self._retained

    def add(self, digest: bytes, *, goes_first: bool = False) -> None:
        """Add a content that was just used, or that goes before all others."""
        if goes_first:
            self._ordinary[digest] = None
            self._ordinary.move_to_end(digest, last=False)
        elif self.retention.used and digest in self.retention:
            self._retained[digest] = None
        else:
            self._ordinary[digest] = None

    def touch(self, digest: bytes) -> None:
        """Take note that a content which is here was used."""
        (self._ordinary if digest in self._ordinary else self._retained).move_to_end(digest)

    def remove(self, digest: bytes) -> None:
        """Take out a content that is here, and may come back."""
        if self._ordinary.pop(digest, _ABSENT) is _ABSENT:
            del self._retained[digest]

    def forget(self, digest: bytes) -> None:
        """Take out a content that is here, for good."""
        self.retention.discard(digest)
        self.remove(digest)

    def pop(self) -> bytes | None:
        """Remove and return the next content to evict; None if there is none."""
        order = self._ordinary or self._retained
        if not order:
            return None
        digest = order.popitem(last=False)[0]
        if self.retention.used:
            self.retention.discard(digest)
        return digest

    def retain(self, tenant: str, weight: float, digests: Iterable[bytes], until: float, cost: float = 1.0) -> None:
        """Evict contents last until a time, as far as the tenant's quota goes; see `Retention.retain`."""
        digests = list(digests)
        self._join(self.retention.retain(tenant, weight, digests, until, cost))
        for digest in reversed(digests):
            if digest in self._ordinary and digest in self.retention:
                del self._ordinary[digest]
                self._retained[digest] = None

    def spend(self, digests: Iterable[bytes]) -> None:
        """Evict contents before all others."""
        for digest in digests:
            self.retention.discard(digest)
            if digest in self:
                self.remove(digest)
                self.add(digest, goes_first=True)

    def expire(self, now: float) -> None:
        """End retentions that are due, `MAX_EXPIRED` at most; the next call ends the rest."""
        if now >= self.retention.next_expiry:
            self._join(self.retention.expire(now, MAX_EXPIRED))

    def _join(self, let_go: list[bytes]) -> None:
        """Put contents that are no longer retained behind all others: where all are, that is the order of their use."""
        for digest in let_go:
            if digest in self._retained:
                del self._retained[digest]
                self._ordinary[digest] = None
