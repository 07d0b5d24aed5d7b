"""Contents of the host's memory that other workers may fetch: each lease is of one request, and names what it is of.

Leases hold rows, which are not reused meanwhile, up to half of them. A lease ends when it was read, when the connection
that reads it ends, when its request is cancelled, or when its time is over. Requests are taken in the order in which
they were handed over: where a new lease needs room, unread ones give way once later ones were opened.
Any thread may call it.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Values
from contextlib import suppress
from dataclasses import dataclass, field

from gpu_worker.execution.tiers.host_tier import HeldRow, HostTier

_SHARE = 0.5
GIVE_WAY_S = 10.0
"""No lease gives way before. While none is opened, as few as a new one needs give way once in so long a time."""


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
    salt: bytes
    rows: dict[tuple[int, bytes], HeldRow]
    num_bytes: int
    granted_at: float
    ends_at: float
    reader: socket.socket | None = None
    has_ended: bool = False


@dataclass(slots=True)
class Leases:
    """Owns the leases of a worker.

    Attributes:
        num_bytes: Of the rows that are held; a row counts for each lease.
        num_read, num_unread: Leases that were read to the end, and those that ended otherwise.
    """

    host: HostTier
    lease_s: float
    clock: Callable[[], float] = time.monotonic
    _by_token: dict[str, Lease] = field(default_factory=dict)
    _ended: threading.Condition = field(default_factory=threading.Condition)
    num_bytes: int = 0
    num_read: int = 0
    num_unread: int = 0
    sent_bytes: int = 0
    # When one was opened or gave way, and when the latest that was opened had been granted.
    _moved_at: float = float("-inf")
    _latest_opened: float = float("-inf")

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def max_bytes(self) -> int:
        """Bytes that may be held."""
        return int(self.host.num_bytes * _SHARE)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether this many more bytes may be held."""
        with self._ended:
            return self._in_the_way(num_bytes) is not None

    def _in_the_way(self, num_bytes: int) -> list[Lease] | None:
        """Return the leases to end so that this many bytes fit; None if there is no room."""
        now, found = self.clock(), list[Lease]()
        num_missing = self.num_bytes + num_bytes - self.max_bytes
        nothing_moves = now > self._moved_at + GIVE_WAY_S
        for lease in self._by_token.values():
            if num_missing <= 0 or now <= lease.granted_at + GIVE_WAY_S:
                break
            if lease.reader is None and (nothing_moves or lease.granted_at < self._latest_opened):
                found.append(lease)
                num_missing -= lease.num_bytes
        return None if num_missing > 0 else found

    def grant(self, request: str, epoch: int, salt: bytes, digests: Values[bytes]) -> Lease | None:
        """Lease the contents of these digests in the host's memory, in all groups; None if none, or too many.

        The reader is the attempt `epoch`.
        """
        rows = self.host.hold(digests)
        num_bytes = self.host.num_bytes_of(rows)
        now = self.clock()
        lease = Lease(secrets.token_hex(16), request, epoch, salt, rows, num_bytes, now, now + self.lease_s)
        with self._ended:
            old = self._in_the_way(num_bytes) if rows else None
            if old is not None:
                self._by_token[lease.token] = lease
                self.num_bytes += num_bytes
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
            self.num_bytes -= lease.num_bytes
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
        """End the leases whose time is over. `now` is monotonic seconds."""
        for lease in list(self._by_token.values()):
            if now > lease.ends_at:
                self.end(lease)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until no lease is left, or a time is over."""
        with self._ended:
            self._ended.wait_for(lambda: not self._by_token, timeout_s)

    def close(self) -> None:
        """End all leases."""
        self.sweep(math.inf)
