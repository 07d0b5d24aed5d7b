"""Places promised to refused clients: a client that returns when told is admitted before one that is new.

A refused request gets a reservation. While the calendar has room within a minute it is booked: its return time is a
promise. Beyond that the client waits in its tenant's line without a booking. To keep its place it must return within
the minute, at a time spread over the last third; it is booked in the order of the line as the calendar moves on.
A reservation that is not used soon after its return time expires, and its place goes to others.

Owns the reservations of one model. Their number is bounded, and one tenant has half of them at most.
"""

from __future__ import annotations

import heapq
import itertools
import math
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gateway.admission.caller import Caller
from gateway.admission.drain_calendar import FILL, HORIZON_S, DrainCalendar

# How long a place is kept after the return time.
GRACE_S = 2.0
MAX_RESERVATIONS = 8192
# Reservations for the same body under the same key: `find` looks at each of them.
MAX_OF_IDENTITY = 256
_FIRST_CHECK_IN_S = 40

Size = tuple[int, int]


@dataclass(slots=True, eq=False)
class Reservation:
    """One refused request's place.

    Attributes:
        ticket: Its unguessable name.
        size: Sequences and estimated prompt tokens of the request; it may not be used for a larger one.
        cost_s: Seconds of the fleet that it takes.
        since: When it was first refused, which decides its place in the line.
        return_at: Return time given to its client; monotonic seconds.
        is_booked: The return time is a promise; otherwise it keeps a place in the line.
        offer: Withdraws it from where other gateways find it; None while they do not.
        promised_wait_s: Wait promised to its client at the booking.
    """

    ticket: str
    key_id: str
    tenant: str
    identity: bytes
    size: Size
    cost_s: float
    since: float
    return_at: float = 0.0
    is_booked: bool = False
    offer: bytes | None = None
    promised_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RetryAdvice:
    """When a refused client should return, and the state of its reservation.

    Attributes:
        wait_s: Whole seconds after which to return.
        ticket: Of its reservation; None when there are too many.
        turn_in_s: For a reservation without a booking, about how long until its turn; None for a booked one.
    """

    wait_s: int
    ticket: str | None
    turn_in_s: float | None


class _Line:
    """One tenant's requests without a booking: seconds of work by the second in which they were first refused."""

    __slots__ = ("_work_s",)

    def __init__(self) -> None:
        self._work_s: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._work_s)

    def add(self, since: float, cost_s: float) -> None:
        second = math.floor(since)
        self._work_s[second] = self._work_s.get(second, 0.0) + cost_s

    def remove(self, since: float, cost_s: float) -> None:
        second = math.floor(since)
        self._work_s[second] -= cost_s
        # Sums of many small numbers do not come back to zero exactly.
        if self._work_s[second] < 1e-9:
            del self._work_s[second]

    def before(self, since: float) -> float:
        since_second = since if since == math.inf else math.floor(since)
        return sum(work_s for second, work_s in self._work_s.items() if second < since_second)


class ReservationBook:
    """The reservations of one model's fleet. Times are monotonic seconds."""

    def __init__(self, uniform: Callable[[], float]) -> None:
        """Spread check-ins by `uniform`, which draws from [0, 1)."""
        self.calendar = DrainCalendar()
        self._uniform = uniform
        self._by_ticket: dict[str, Reservation] = {}
        self._by_identity: dict[bytes, list[Reservation]] = {}
        self._num_of_tenant: Counter[str] = Counter()
        self._expiring: list[tuple[float, int, Reservation]] = []
        self._numbers = itertools.count()
        # Until when the fleet is busy with requests whose promise could not be kept.
        self._amended_until = 0.0
        # By tenant: a request without a booking waits only behind those of its own tenant.
        self._lines: dict[str, _Line] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def get(self, ticket: str | None) -> Reservation | None:
        """Return the reservation of a ticket."""
        return None if ticket is None else self._by_ticket.get(ticket)

    def adopt(self, reservation: Reservation) -> None:
        """Take over a reservation that another gateway has made, unless there are too many."""
        if self._is_full(reservation.tenant, reservation.identity) or reservation.ticket in self._by_ticket:
            return
        self._add(reservation)
        if reservation.is_booked:
            self._book(reservation, reservation.return_at)
        else:
            self._join_line(reservation)
        self._expect(reservation, reservation.return_at)

    def expire(self, now: float) -> list[Reservation]:
        """Drop the reservations of clients that did not return here, and return those that were booked."""
        unused = []
        while self._expiring and self._expiring[0][0] + GRACE_S < now:
            at, _, reservation = heapq.heappop(self._expiring)
            if reservation.return_at == at and self._by_ticket.get(reservation.ticket) is reservation:
                if reservation.is_booked:
                    unused.append(reservation)
                self.use(reservation)
        return unused

    def find(self, caller: Caller, size: Size, now: float) -> Reservation | None:
        """Return the reservation with which a caller comes back."""
        if not self._by_ticket:
            return None
        found = self._by_ticket.get(caller.ticket) if caller.ticket is not None else None
        if found is not None and found.key_id != caller.key_id:
            found = None
        if found is None and caller.is_retry is not False:
            same = self._by_identity.get(caller.identity, ())
            # Before its return time only a client that says so is the same one: another may send the same body.
            returning = [each for each in same if caller.is_retry or each.return_at <= now]
            found = min(returning, key=lambda each: each.return_at, default=None)
        is_covered = found is not None and size[0] <= found.size[0] and size[1] <= found.size[1]
        return found if is_covered else None

    def has_room(self, caller: Caller, found: Reservation | None, excess_s: float, cost_s: float, now: float) -> bool:
        """Whether a request can begin now without a promise of this moment, and every promise can still be kept."""
        if found is not None and found.is_booked:
            self._unbook(found)
            has_room = self.calendar.has_room_now(now, excess_s, cost_s, caller.tenant, 0.0)
            self._book(found, found.return_at)
            return has_room
        return self.calendar.has_room_now(now, excess_s, cost_s, caller.tenant, self._earlier_s(caller.tenant, found))

    def use(self, reservation: Reservation) -> None:
        """End a reservation: its request begins, or its client did not come."""
        if reservation.is_booked:
            self._unbook(reservation)
        else:
            self._leave_line(reservation)
        del self._by_ticket[reservation.ticket]
        same = self._by_identity[reservation.identity]
        same.remove(reservation)
        if not same:
            del self._by_identity[reservation.identity]
        self._num_of_tenant[reservation.tenant] -= 1
        if not self._num_of_tenant[reservation.tenant]:
            del self._num_of_tenant[reservation.tenant]

    def refuse(
        self, caller: Caller, found: Reservation | None, size: Size, excess_s: float, cost_s: float, now: float
    ) -> RetryAdvice:
        """Give a refused request a place, or a returning one its next, and say when to come."""
        if found is not None and found.return_at > now:
            # Too early: its place is kept, and nothing changes.
            return RetryAdvice(
                math.ceil(found.return_at - now),
                found.ticket,
                None if found.is_booked else self._earlier_s(caller.tenant, found),
            )
        if found is not None and found.is_booked:
            # The promise could not be kept: it has the next place, whatever is booked there, behind others like it.
            self._unbook(found)
            begin = max(self._amended_until, now + excess_s)
            self._amended_until = begin + cost_s * self.calendar.num_gateways
            return self._promise(found, min(HORIZON_S, max(1, math.ceil((begin - now) / FILL))), now)
        earlier_s = self._earlier_s(caller.tenant, found)
        room = self.calendar.first_room(now, excess_s, cost_s, caller.tenant, earlier_s)
        reservation = found or self._new(caller, size, cost_s, now)
        if reservation is None:
            return RetryAdvice(self._check_in_s(), None, earlier_s + HORIZON_S)
        if room is not None:
            self._leave_line(reservation)
            return self._promise(reservation, room, now)
        wait_s = self._check_in_s()
        self._expect(reservation, now + wait_s)
        turn_in_s = self.calendar.late_turn_s(now, excess_s, cost_s, caller.tenant, earlier_s)
        return RetryAdvice(wait_s, reservation.ticket, turn_in_s)

    def _new(self, caller: Caller, size: Size, cost_s: float, now: float) -> Reservation | None:
        """Return a new reservation at the end of the line, unless there are too many."""
        if self._is_full(caller.tenant, caller.identity):
            return None
        ticket = secrets.token_urlsafe(12)
        reservation = Reservation(ticket, caller.key_id, caller.tenant, caller.identity, size, cost_s, now)
        self._add(reservation)
        self._join_line(reservation)
        return reservation

    def _is_full(self, tenant: str, identity: bytes) -> bool:
        num_equal = len(self._by_identity.get(identity, ()))
        num_of_tenant = self._num_of_tenant.get(tenant, 0)
        return len(self) >= MAX_RESERVATIONS or num_of_tenant >= MAX_RESERVATIONS // 2 or num_equal >= MAX_OF_IDENTITY

    def _add(self, reservation: Reservation) -> None:
        self._by_ticket[reservation.ticket] = reservation
        self._by_identity.setdefault(reservation.identity, []).append(reservation)
        self._num_of_tenant[reservation.tenant] += 1

    def _join_line(self, reservation: Reservation) -> None:
        self._lines.setdefault(reservation.tenant, _Line()).add(reservation.since, reservation.cost_s)

    def _leave_line(self, reservation: Reservation) -> None:
        line = self._lines[reservation.tenant]
        line.remove(reservation.since, reservation.cost_s)
        if not line:
            del self._lines[reservation.tenant]

    def _earlier_s(self, tenant: str, reservation: Reservation | None) -> float:
        """Return the work of its tenant that is in the line before a reservation, or before a newcomer."""
        line = self._lines.get(tenant)
        if line is None:
            return 0.0
        return line.before(math.inf if reservation is None else reservation.since)

    def _promise(self, reservation: Reservation, wait_s: int, now: float) -> RetryAdvice:
        reservation.promised_wait_s = wait_s
        self._book(reservation, now + wait_s)
        self._expect(reservation, now + wait_s)
        return RetryAdvice(wait_s, reservation.ticket, None)

    def _book(self, reservation: Reservation, at: float) -> None:
        reservation.is_booked = True
        reservation.return_at = at
        self.calendar.book(at, reservation.cost_s, reservation.tenant)

    def _unbook(self, reservation: Reservation) -> None:
        reservation.is_booked = False
        self.calendar.free(reservation.return_at, reservation.cost_s, reservation.tenant)

    def _expect(self, reservation: Reservation, at: float) -> None:
        reservation.return_at = at
        heapq.heappush(self._expiring, (at, next(self._numbers), reservation))

    def _check_in_s(self) -> int:
        return _FIRST_CHECK_IN_S + math.floor(self._uniform() * (HORIZON_S - _FIRST_CHECK_IN_S + 1))
