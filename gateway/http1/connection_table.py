"""All connections of one server: which may stay when there are too many, and which have timed out.

Owns the set of connections, the order of those that wait for a request or receive its body, and the switch to draining.
A connection waits from its accept, or its last answer, until the next request's head is complete, and receives while a
handler waits for the rest of a body. To make room, the connection that waits longest is closed, and where none waits
the one that has received longest, but none that has had no time to send its request, whose bytes this process has not
read yet (after a pause of its own), or whose request is complete.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Generic, Protocol, TypeVar

from gateway.http1.body import BodyBudget
from shared.pause_detector import PauseDetector

# Connections beyond the limit: they are served health and refusals, one answer each.
MAX_EXTRA_CONNECTIONS = 64
# Time of a client to send its request before its connection may be closed to make room; else a burst closes itself.
MIN_WAIT_S = 0.5
SWEEP_INTERVAL_S = 0.5
# A sweep that is later than this was held up itself, together with every client's bytes.
MAX_SWEEP_DELAY_S = 1.0


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How much of each thing a connection may have.

    Attributes:
        max_connections: Connections that are served; when all are busy, one more is served health checks alone.
        max_per_address: The same for the connections of one client address; None does not limit.
        max_body_bytes_in_flight: Bytes of bodies that may be on their way in, over all connections.
        head_timeout_s: Time from a connection's accept, or the first byte of a request, to the end of its head.
        body_timeout_s: Time from there to the end of its body, besides the allowance for received bytes.
        keep_alive_s: Time a connection may wait for its next request.
        send_timeout_s: Time for which a client may take no bytes at all, while more wait than the transport likes.
        linger_s: Time after the last answer in which the client's remaining bytes are read and dropped: closing at once
            would reset the connection, and the client could lose the answer.
    """

    max_connections: int = 4096
    max_body_bytes_in_flight: int = 256 << 20
    max_per_address: int | None = None
    head_timeout_s: float = 15.0
    body_timeout_s: float = 30.0
    keep_alive_s: float = 75.0
    send_timeout_s: float = 35.0
    linger_s: float = 5.0


class Member(Protocol):
    """A connection as the table sees it; `is_limited` if it exceeds the limit, and gets one answer at most."""

    address: str
    is_limited: bool

    def has_unread_bytes(self) -> bool:
        """Whether bytes have arrived that were not read yet."""

    def evict(self) -> None:
        """Close at once; no request is being answered, but one may be on its way."""

    def drain(self) -> None:
        """Close soon; no request is being answered."""

    def expire(self, now: float) -> None:
        """Act, if its time is up. `now` is loop time."""

    def postpone(self, seconds: float) -> None:
        """Move its deadlines."""


M = TypeVar("M", bound=Member)


class ConnectionTable(Generic[M]):
    """The connections of one server."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.body_budget = BodyBudget(limits.max_body_bytes_in_flight, limits.max_connections)
        self.members: set[M] = set()
        self.is_draining = False
        self.num_evicted = 0
        self.num_limited = 0
        self._num_reported = 0
        # Since when, the longest first.
        self._waiting: dict[M, float] = {}
        self._waiting_extra: dict[M, float] = {}
        self._receiving: dict[M, float] = {}
        self._num_per_address: Counter[str] = Counter()
        self._clock = clock
        self._pauses = PauseDetector(SWEEP_INTERVAL_S, MAX_SWEEP_DELAY_S, clock)
        self.default_headers = _default_headers()

    @property
    def num_places(self) -> int:
        """How many connections may be added now.

        Those beyond the limit are refused, so there are places for them only where no other may soon make room.
        """
        num_free = self.limits.max_connections - len(self.members)
        if num_free <= 0 and not self._waiting and not self._receiving:
            num_free += MAX_EXTRA_CONNECTIONS
        return num_free if num_free > 0 else int(self._evictable() is not None)

    def add(self, member: M) -> bool:
        """Add a connection, making room for it if possible; return whether it is one too many."""
        limits = self.limits
        evictable = self._evictable()
        if evictable is not None:
            self.num_evicted += 1
            # Its own news of the end comes later, and must not be waited for.
            self.remove(evictable)
            evictable.evict()
        self.members.add(member)
        num_of_address = self._num_per_address[member.address] + 1
        self._num_per_address[member.address] = num_of_address
        is_limited = len(self.members) > limits.max_connections or (
            limits.max_per_address is not None and num_of_address > limits.max_per_address
        )
        (self._waiting_extra if is_limited else self._waiting)[member] = self._clock()
        self.num_limited += is_limited
        return is_limited

    def remove(self, member: M) -> None:
        """Forget a connection, if it is still known."""
        if member not in self.members:
            return
        self.members.discard(member)
        self.note_busy(member)
        self._num_per_address[member.address] -= 1
        if not self._num_per_address[member.address]:
            del self._num_per_address[member.address]

    def note_busy(self, member: M) -> None:
        """Note that a request's head, or its whole body, has arrived."""
        (self._waiting_extra if member.is_limited else self._waiting).pop(member, None)
        self._receiving.pop(member, None)

    def note_receiving(self, member: M) -> None:
        """Note that a handler waits for the rest of a request's body."""
        if member in self.members and not member.is_limited:
            self._receiving[member] = self._clock()

    def note_waiting(self, member: M) -> None:
        """Note that a connection waits for its next request, or for its client to leave."""
        self._receiving.pop(member, None)
        if member in self.members:
            (self._waiting_extra if member.is_limited else self._waiting)[member] = self._clock()

    def sweep(self) -> None:
        """Let every connection look at its deadline."""
        now = self._clock()
        has_paused = self._pauses.tick()
        self.default_headers = _default_headers()
        if self.num_evicted > self._num_reported:
            num = self.num_evicted - self._num_reported
            self._num_reported = self.num_evicted
            _logger.warning("connections without a whole request were closed to make room", extra={"num": num})
        for member in list(self.members):
            if has_paused:
                member.postpone(self._pauses.lost_s)
            member.expire(now)

    def drain(self) -> None:
        """Make every answer the last; connections that get no request soon are closed."""
        self.is_draining = True
        for member in [*self._waiting, *self._waiting_extra]:
            member.drain()

    def _evictable(self) -> M | None:
        """Return the connection that makes room for one more; None if there is room, or none may be closed."""
        num_extra = len(self.members) - self.limits.max_connections
        if num_extra < 0:
            return None
        latest = self._clock() - MIN_WAIT_S
        kinds = [self._waiting or self._receiving]
        if num_extra >= MAX_EXTRA_CONNECTIONS:
            kinds.append(self._waiting_extra)
        for members in kinds:
            for member, since in members.items():
                if since > latest:
                    break
                if not member.has_unread_bytes():
                    return member
        return None


def _default_headers() -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(time.time(), usegmt=True).encode())]
