"""Contents of the host's memory that other workers may fetch: each lease is of one request, and names what it is of.

Leases hold rows, which are not reused meanwhile, up to half of them. A lease ends when it was read, when the connection
that reads it ends, when its request is cancelled, or when its time is over. Any thread may call it.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence as Values
from contextlib import suppress
from dataclasses import dataclass, field

from gpu_worker.execution.tiers.host_tier import HeldRow, HostTier

_SHARE = 0.5


@dataclass(slots=True, eq=False)
class Lease:
    """Contents that whoever knows the token may fetch, as the request's attempt `epoch`.

    Attributes:
        rows: What is held, by group and digest.
        ends_at: Monotonic seconds.
        reader: The connection on which it is read; only one ever reads it.
    """

    token: str
    request: str
    epoch: int
    salt: bytes
    rows: dict[tuple[int, bytes], HeldRow]
    num_bytes: int
    ends_at: float
    reader: socket.socket | None = None
    has_ended: bool = False


@dataclass(slots=True)
class LeaseCounts:
    """Counts since the start: leases granted, those read to the end, those that ended otherwise, and bytes sent."""

    granted: int = 0
    read: int = 0
    unread: int = 0
    refused: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class Leases:
    """Owns the leases of a worker."""

    host: HostTier
    lease_s: float
    counts: LeaseCounts = field(default_factory=LeaseCounts)
    _by_token: dict[str, Lease] = field(default_factory=dict)
    _ended: threading.Condition = field(default_factory=threading.Condition)
    _num_bytes: int = 0

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that are held; a row counts for each lease."""
        return self._num_bytes

    @property
    def max_bytes(self) -> int:
        """Bytes that may be held."""
        return int(self.host.num_bytes * _SHARE)

    def has_room(self, num_bytes: int) -> bool:
        """Say whether so many bytes more may be held."""
        return self._num_bytes + num_bytes <= self.max_bytes

    def grant(self, request: str, epoch: int, salt: bytes, digests: Values[bytes]) -> Lease | None:
        """Lease what is in the host's memory of these digests, in all groups; None where that is nothing, or too much.

        The reader is the attempt `epoch`.
        """
        rows = self.host.hold(digests)
        num_bytes = self.host.num_bytes_of(rows)
        lease = Lease(secrets.token_hex(16), request, epoch, salt, rows, num_bytes, time.monotonic() + self.lease_s)
        with self._ended:
            if rows and self.has_room(num_bytes):
                self._by_token[lease.token] = lease
                self._num_bytes += num_bytes
                self.counts.granted += 1
                return lease
        self.host.let_go(rows)
        return None

    def open(self, token: str, request: str, epoch: int, reader: socket.socket) -> Lease | None:
        """Return the lease of an attempt, which nobody has opened before; `reader` is closed when it ends."""
        with self._ended:
            lease = self._by_token.get(token)
            is_right = lease is not None and (lease.request, lease.epoch) == (request, epoch)
            if lease is None or not is_right or lease.reader is not None or time.monotonic() > lease.ends_at:
                self.counts.refused += 1
                return None
            lease.reader = reader
            return lease

    def end(self, lease: Lease, *, was_read: bool = False) -> None:
        """End a lease, unless it has ended."""
        with self._ended:
            if lease.has_ended:
                return
            lease.has_ended = True
            del self._by_token[lease.token]
            self._num_bytes -= lease.num_bytes
            if was_read:
                self.counts.read += 1
            else:
                self.counts.unread += 1
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
        for lease in list(self._by_token.values()):
            self.end(lease)
