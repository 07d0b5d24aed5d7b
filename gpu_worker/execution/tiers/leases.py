"""Contents of the host's memory that other workers may fetch: each lease is of one request, and names what it is of.

Leases hold rows, which are not reused meanwhile, up to half of them. A lease ends when it was read, when the connection
that reads it ends, when its request is cancelled, or when its time is over. Where a new lease needs room, unread ones
of a tenant above its share give way to a tenant below. Requests are taken in the order in which they were handed over:
unread ones end once later ones were opened.
Any thread may call it.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Values
from contextlib import suppress
from dataclasses import dataclass, field

from gpu_worker.execution.tiers.host_tier import HeldRow, HostTier

_SHARE = 0.5
GIVE_WAY_S = 10.0
"""No lease gives way before to one of its tenant. While none is opened, as few as a new one needs give way once in so
long a time."""
_POLL_S = 0.25


@dataclass(slots=True, eq=False)
class Lease:
    """Contents that any client with the token may fetch, as the request's attempt `epoch`.

    Attributes:
        rows: The rows held, by group and digest.
        granted_at, ends_at: Monotonic seconds.
        reader: The connection on which it is read; only one ever reads it.
    """

    token: str
    request: str
    epoch: int
    tenant: str
    salt: bytes
    rows: dict[tuple[int, bytes], HeldRow]
    granted_at: float
    ends_at: float
    reader: socket.socket | None = None
    has_ended: bool = False


@dataclass(slots=True)
class _Use:
    """The rows that leases of each tenant hold, and their bytes: each counts once, however many leases are of it."""

    host: HostTier
    num_leases: Counter[tuple[str, HeldRow]] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def copy(self) -> _Use:
        return _Use(self.host, self.num_leases.copy(), self.num_bytes.copy())

    def added_bytes(self, tenant: str, rows: Mapping[tuple[int, bytes], HeldRow]) -> int:
        return self.host.num_bytes_of(name for name, row in rows.items() if (tenant, row) not in self.num_leases)

    def add(self, lease: Lease) -> None:
        self.num_bytes[lease.tenant] += self.added_bytes(lease.tenant, lease.rows)
        self.num_leases.update((lease.tenant, row) for row in lease.rows.values())

    def remove(self, lease: Lease) -> None:
        self.num_leases.subtract((lease.tenant, row) for row in lease.rows.values())
        for row in lease.rows.values():
            if not self.num_leases[lease.tenant, row]:
                del self.num_leases[lease.tenant, row]
        self.num_bytes[lease.tenant] -= self.added_bytes(lease.tenant, lease.rows)
        if not self.num_bytes[lease.tenant]:
            del self.num_bytes[lease.tenant]


@dataclass(slots=True)
class Leases:
    """Owns the leases of a worker.

    Attributes:
        num_read, num_unread: Leases that were read to the end, and those that ended otherwise.
    """

    host: HostTier
    lease_s: float
    clock: Callable[[], float] = time.monotonic
    _by_token: dict[str, Lease] = field(default_factory=dict)
    _ended: threading.Condition = field(default_factory=threading.Condition)
    _use: _Use = field(init=False)
    num_read: int = 0
    num_unread: int = 0
    sent_bytes: int = 0
    # When one was opened or gave way, and when the latest that was opened had been granted.
    _moved_at: float = float("-inf")
    _latest_opened: float = float("-inf")

    def __post_init__(self) -> None:
        self._use = _Use(self.host)

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that are held."""
        return self._use.num_bytes.total()

    @property
    def max_bytes(self) -> int:
        """Bytes that may be held."""
        return int(self.host.num_bytes * _SHARE)

    def has_room(self, num_bytes: int, tenant: str = "") -> bool:
        """Return whether this many more bytes may be held for a tenant."""
        with self._ended:
            return self._in_the_way(num_bytes, tenant) is not None

    def _in_the_way(self, num_bytes: int, tenant: str) -> list[Lease] | None:
        """Return the leases to end so that this many bytes of a tenant fit; None if there is no room."""
        most_bytes = self.max_bytes - num_bytes
        if self.num_bytes <= most_bytes:
            return []
        now, left, found = self.clock(), self._use.copy(), list[Lease]()
        share = self.max_bytes / len({*left.num_bytes, tenant})
        unread = [lease for lease in self._by_token.values() if lease.reader is None]
        for lease in reversed(unread) if left.num_bytes[tenant] + num_bytes <= share else ():
            if left.num_bytes.total() > most_bytes and left.num_bytes[lease.tenant] > share:
                found.append(lease)
                left.remove(lease)
        nothing_moves = now > self._moved_at + GIVE_WAY_S
        for lease in unread:
            if left.num_bytes.total() <= most_bytes or now <= lease.granted_at + GIVE_WAY_S:
                break
            if (nothing_moves or lease.granted_at < self._latest_opened) and lease not in found:
                found.append(lease)
                left.remove(lease)
        return found if left.num_bytes.total() <= most_bytes else None

    def grant(self, request: str, epoch: int, salt: bytes, digests: Values[bytes], tenant: str = "") -> Lease | None:
        """Lease the contents of these digests in the host's memory, in all groups; None if none, or too many.

        The reader is the attempt `epoch`.
        """
        rows = self.host.hold(digests)
        now = self.clock()
        lease = Lease(secrets.token_hex(16), request, epoch, tenant, salt, rows, now, now + self.lease_s)
        with self._ended:
            old = self._in_the_way(self._use.added_bytes(tenant, rows), tenant) if rows else None
            if old is not None:
                self._by_token[lease.token] = lease
                self._use.add(lease)
            if old:
                self._moved_at = now
        if old is None:
            self.host.let_go(rows)
            return None
        for each in old:
            self.end(each)
        return lease

    def open(self, token: str, request: str, epoch: int, reader: socket.socket) -> Lease | None:
        """Return the unopened lease of an attempt; `reader` is closed when it ends."""
        with self._ended:
            lease = self._by_token.get(token)
            is_right = lease is not None and (lease.request, lease.epoch) == (request, epoch)
            if lease is None or not is_right or lease.reader is not None or self.clock() > lease.ends_at:
                return None
            lease.reader = reader
            self._moved_at = self.clock()
            self._latest_opened = max(self._latest_opened, lease.granted_at)
            return lease

    def end(self, lease: Lease, *, was_read: bool = False) -> None:
        """End a lease, unless it has ended."""
        with self._ended:
            if lease.has_ended:
                return
            lease.has_ended = True
            del self._by_token[lease.token]
            self._use.remove(lease)
            self.num_read += was_read
            self.num_unread += not was_read
            reader = lease.reader
            self._ended.notify_all()
        if reader is not None:
            with suppress(OSError):
                reader.shutdown(socket.SHUT_RDWR)
        self.host.let_go(lease.rows)

    def cancel(self, request: str, epoch: int | None) -> None:
        """End the leases of a request whose attempts up to `epoch`, or all, were cancelled."""
        for lease in list(self._by_token.values()):
            if lease.request == request and (epoch is None or lease.epoch <= epoch):
                self.end(lease)

    def sweep(self, now: float) -> None:
        """End the leases whose time is over, or that were passed over. `now` is monotonic seconds."""
        for lease in list(self._by_token.values()):
            is_passed = lease.granted_at < self._latest_opened and now > lease.granted_at + GIVE_WAY_S
            if now > lease.ends_at or (is_passed and lease.reader is None):
                self.end(lease)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until no lease is left, none is read and none was granted or opened for `GIVE_WAY_S`, or the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._ended:
            while self._is_awaited() and (left_s := deadline - time.monotonic()) > 0:
                self._ended.wait(min(left_s, _POLL_S))

    def _is_awaited(self) -> bool:
        leases = self._by_token.values()
        moved_at = max([self._moved_at, *(lease.granted_at for lease in leases)])
        is_moving = any(lease.reader for lease in leases) or self.clock() <= moved_at + GIVE_WAY_S
        return bool(leases) and is_moving

    def close(self) -> None:
        """End all leases."""
        self.sweep(math.inf)
