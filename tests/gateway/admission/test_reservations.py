"""Reservations: who is recognised, what is kept for whom and how long, and bounds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.admission import reservations
from gateway.admission.caller import Caller
from gateway.admission.reservations import (
    GRACE_S,
    MAX_OF_IDENTITY,
    MAX_RESERVATIONS,
    Reservation,
    ReservationBook,
    RetryAdvice,
)

NOW = 1000.0
SIZE = (1, 100)
COST_S = 0.5


def caller(body: str = "body", key_id: str = "key", tenant: str = "tenant", **headers: str) -> Caller:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Caller(key_id, tenant, raw, body.encode())


@pytest.fixture
def book() -> ReservationBook:
    return ReservationBook(lambda: 0.5)


def refuse(book: ReservationBook, who: Caller, now: float = NOW, excess_s: float = 5.0) -> RetryAdvice:
    return book.refuse(who, book.find(who, SIZE, now), SIZE, excess_s, COST_S, now)


def found(book: ReservationBook, who: Caller, now: float) -> Reservation | None:
    book.expire(now)
    return book.find(who, SIZE, now)


def test_same_body_is_recognised_when_its_time_has_come_and_not_before(book: ReservationBook) -> None:
    told = refuse(book, caller())
    assert found(book, caller(), NOW + told.wait_s - 0.01) is None
    assert found(book, caller("other"), NOW + told.wait_s) is None
    reservation = found(book, caller(), NOW + told.wait_s)
    assert reservation is not None
    assert reservation.ticket == told.ticket


def test_client_that_says_it_is_a_retry_is_recognised_early_and_gains_nothing(book: ReservationBook) -> None:
    told = refuse(book, caller(x_stainless_retry_count="0"))
    again = refuse(book, caller(x_stainless_retry_count="1"), NOW + 1)
    assert again == RetryAdvice(told.wait_s - 1, told.ticket, None)
    assert len(book) == 1


def test_first_attempt_never_takes_the_place_of_one_that_returns(book: ReservationBook) -> None:
    told = refuse(book, caller())
    assert found(book, caller(x_stainless_retry_count="0"), NOW + told.wait_s) is None


def test_ticket_is_recognised_with_another_body_but_not_under_another_key(book: ReservationBook) -> None:
    told = refuse(book, caller())
    assert told.ticket is not None
    assert found(book, caller("other", x_headrace_ticket=told.ticket), NOW + 1) is not None
    assert found(book, caller("other", key_id="thief", x_headrace_ticket=told.ticket), NOW + told.wait_s) is None


@pytest.mark.parametrize("size", [(2, 100), (1, 101)])
def test_place_is_not_used_for_a_larger_request(book: ReservationBook, size: tuple[int, int]) -> None:
    told = refuse(book, caller())
    assert book.find(caller(), size, NOW + told.wait_s) is None


def test_equal_requests_of_one_key_have_a_place_each(book: ReservationBook) -> None:
    tolds = [refuse(book, caller()) for _ in range(5)]
    assert len({told.ticket for told in tolds}) == 5
    now = NOW + max(told.wait_s for told in tolds)
    for expected in range(5, 0, -1):
        assert len(book) == expected
        reservation = book.find(caller(), SIZE, now)
        assert reservation is not None
        # The first one first: the others may still be waited for.
        assert reservation.return_at == NOW + tolds[-expected].wait_s
        book.use(reservation)
    assert book.find(caller(), SIZE, now) is None


def test_request_without_a_place_begins_where_the_queue_is_short_enough(book: ReservationBook) -> None:
    assert book.has_room(caller(), None, -1.0, COST_S, NOW)
    assert not book.has_room(caller(), None, 0.1, COST_S, NOW)


def test_place_that_is_not_used_goes_to_others_after_a_moment(book: ReservationBook) -> None:
    told = refuse(book, caller())
    assert len(book.expire(NOW + told.wait_s + GRACE_S)) == 0
    assert len(book.expire(NOW + told.wait_s + GRACE_S + 0.01)) == 1
    assert len(book) == 0
    assert book.calendar.is_empty
    assert found(book, caller(), NOW + told.wait_s + GRACE_S + 0.01) is None


def test_promise_that_was_not_kept_has_the_next_place(book: ReservationBook) -> None:
    others = [refuse(book, caller(f"other {i}")) for i in range(90)]
    assert refuse(book, caller("first")).wait_s > 50
    now = NOW + others[2].wait_s
    assert [refuse(book, caller(f"other {i}"), now, excess_s=1.5).wait_s for i in range(3)] == [2, 3, 3]
    # Their first places are free again.
    num_booked = sum(each.is_booked for each in book._by_ticket.values())
    assert sum(book.calendar._booked.values()) == pytest.approx(num_booked * COST_S)


def test_line_beyond_the_horizon_is_spread_and_booked_in_its_order(book: ReservationBook) -> None:
    tolds = [refuse(book, caller(f"{i}"), NOW + i / 100, excess_s=20.0) for i in range(500)]
    waiting = [i for i, told in enumerate(tolds) if told.turn_in_s is not None]
    assert waiting == list(range(waiting[0], 500))
    assert {tolds[i].wait_s for i in waiting} == {50}
    ahead = [tolds[i].turn_in_s or 0.0 for i in waiting]
    assert ahead == sorted(ahead)
    assert ahead[-1] == pytest.approx(20 + 500 * COST_S, rel=0.2)
    # A minute later the older ones are booked first, although the youngest asks first.
    now = NOW + 55
    for i in range(waiting[0]):
        reservation = book._by_ticket.get(tolds[i].ticket or "")
        if reservation is not None:
            book.use(reservation)
    again = {i: refuse(book, caller(f"{i}"), now, excess_s=30.0) for i in reversed(waiting)}
    is_booked = [again[i].turn_in_s is None for i in waiting]
    # They are told apart by the second in which they were first refused, a hundred of them each.
    shares = [sum(is_booked[begin : begin + 100]) for begin in range(0, len(is_booked), 100)]
    assert sum(shares[:1]) > 20
    assert sum(shares[2:]) == 0


def test_client_in_the_line_that_does_not_return_is_forgotten(book: ReservationBook) -> None:
    told = refuse(book, caller(x_stainless_retry_count="0"), excess_s=100.0)
    assert told.turn_in_s is not None
    assert len(book.expire(NOW + told.wait_s + GRACE_S - 0.1)) == 0
    # Before its time it is told the rest of it.
    again = refuse(book, caller(x_stainless_retry_count="1"), NOW + 1, excess_s=100.0)
    assert (again.wait_s, again.ticket, len(book)) == (told.wait_s - 1, told.ticket, 1)
    assert len(book.expire(NOW + told.wait_s + GRACE_S + 0.1)) == 0
    assert (len(book), book._lines) == (0, {})


def test_those_refused_in_the_same_second_are_not_in_each_others_way(book: ReservationBook) -> None:
    for moment, body in ((0.2, "a"), (0.5, "b")):
        refuse(book, caller(body, x_stainless_retry_count="0"), NOW + moment, excess_s=100.0)
    later = [refuse(book, caller(body, x_stainless_retry_count="1"), NOW + 1, excess_s=100.0) for body in "ab"]
    assert [told.turn_in_s for told in later] == [0.0, 0.0]


def test_reservation_of_another_gateway_is_taken_over_once_and_while_there_is_room(
    book: ReservationBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ReservationBook(lambda: 0.5)
    tickets = [refuse(other, caller(body)).ticket for body in "abc"]
    monkeypatch.setattr(reservations, "MAX_RESERVATIONS", 4)
    for ticket in [tickets[0], *tickets]:
        reservation = other.get(ticket)
        assert reservation is not None
        book.adopt(reservation)
    # One tenant has at most half of the places.
    assert [book.get(ticket) is not None for ticket in tickets] == [True, True, False]
    assert sum(book.calendar._booked.values()) == pytest.approx(2 * COST_S)
    # It is kept for no longer here than there.
    assert len(book.expire(NOW + 60 + GRACE_S)) == 2
    assert len(book) == 0


def test_one_tenants_line_is_not_in_the_way_of_another(book: ReservationBook) -> None:
    for i in range(300):
        refuse(book, caller(f"{i}", tenant="hog"))
    small = refuse(book, caller("x", key_id="small", tenant="small"))
    assert small.turn_in_s is None
    assert small.wait_s < 20


def test_check_ins_are_spread_over_the_last_third_of_the_minute() -> None:
    draws = iter([0.0, 0.25, 0.5, 0.999])
    book = ReservationBook(lambda: next(draws))
    assert [refuse(book, caller(f"{i}"), excess_s=100.0).wait_s for i in range(4)] == [40, 45, 50, 60]


def test_number_of_reservations_is_bounded_and_one_tenant_gets_half_whatever_its_keys(
    book: ReservationBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "MAX_RESERVATIONS", 10)
    assert MAX_RESERVATIONS >= 1000
    for tenant, number in (("a", 5), ("b", 5), ("c", 0)):
        callers = [caller(f"{i}", key_id=f"{tenant}{i % 3}", tenant=tenant) for i in range(8)]
        tolds = [refuse(book, who, excess_s=100.0) for who in callers]
        assert [told.ticket is not None for told in tolds] == [True] * number + [False] * (8 - number)
        assert all(1 <= told.wait_s <= 60 for told in tolds)
    assert len(book) == 10


def test_number_of_reservations_for_one_body_is_bounded(book: ReservationBook) -> None:
    tolds = [refuse(book, caller(), excess_s=0.0) for _ in range(MAX_OF_IDENTITY + 5)]
    assert len(book) == MAX_OF_IDENTITY
    assert [told.ticket for told in tolds[-5:]] == [None] * 5
    assert refuse(book, caller("another")).ticket is not None


class ReservationMachine(RuleBasedStateMachine):
    """Clients of three tenants are refused, return early, in time, late or never, and are admitted or not."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.book = ReservationBook(lambda: 0.3)

    @rule(who=st.integers(0, 11), excess_s=st.floats(0.0, 90.0))
    def refuse(self, who: int, excess_s: float) -> None:
        self.book.expire(self.now)
        told = refuse(self.book, self.caller(who), self.now, excess_s)
        assert 1 <= told.wait_s <= 60
        assert told.ticket is not None

    @rule(who=st.integers(0, 11))
    def admit(self, who: int) -> None:
        reservation = found(self.book, self.caller(who), self.now)
        if reservation is not None:
            self.book.has_room(self.caller(who), reservation, -1.0, COST_S, self.now)
            self.book.use(reservation)

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def all_stay_away(self) -> None:
        self.now += 100
        self.book.expire(self.now)
        assert len(self.book) == 0
        assert self.book.calendar.is_empty
        assert not self.book._lines
        assert not self.book._expiring
        assert not self.book._num_of_tenant

    @invariant()
    def calendar_holds_exactly_what_is_booked(self) -> None:
        booked = sum(each.cost_s for each in self.book._by_ticket.values() if each.is_booked)
        assert sum(self.book.calendar._booked.values()) == pytest.approx(booked, abs=1e-6)
        assert sum(self.book.calendar._by_tenant.values()) == pytest.approx(booked, abs=1e-6)

    @staticmethod
    def caller(who: int) -> Caller:
        return caller(f"{who % 6}", key_id=f"{who % 3}", tenant=f"{who % 3}")


class TestReservationMachine(ReservationMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestReservationMachineAtLength(ReservationMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40)
