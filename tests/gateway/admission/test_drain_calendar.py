"""The calendar of what a fleet's coming seconds are promised to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.drain_calendar import FILL, FILL_OF_DOMINANT, HORIZON_S, DrainCalendar

NOW = 1000.0


def booked_until_full(calendar: DrainCalendar, tenant: str, cost_s: float, excess_s: float = 0.0) -> list[int]:
    waits: list[int] = []
    while (wait_s := calendar.first_room(NOW, excess_s, cost_s, tenant, 0.0)) is not None:
        calendar.book(NOW + wait_s, cost_s, tenant)
        waits.append(wait_s)
    return waits


def test_first_room_is_when_the_excess_and_the_request_have_drained() -> None:
    assert DrainCalendar().first_room(NOW, 9.0, 0.5, "a", 0.0) == 10
    assert DrainCalendar().first_room(NOW, 9.0, 0.51, "a", 0.0) == 11
    # Whoever is told to return waits for a second at least.
    assert DrainCalendar().first_room(NOW, -9.0, 0.5, "a", 0.0) == 1


def test_room_is_behind_what_was_promised_for_now_and_for_the_others_gateways() -> None:
    calendar = DrainCalendar()
    calendar.book(NOW, 1.5, "a")
    assert calendar.first_room(NOW, 9.0, 0.5, "b", 0.0) == 12
    # With so little booked, nobody has most of it.
    assert calendar.first_room(NOW, 9.0, 0.5, "a", 0.0) == 12
    calendar.book(NOW, 1.0, "a")
    assert calendar.first_room(NOW, 9.0, 0.5, "b", 0.0) == 13
    assert calendar.first_room(NOW, 9.0, 0.5, "a", 0.0) == 15
    # What was promised and taken back leaves no trace.
    calendar.book(NOW, 2.0, "b")
    calendar.free(NOW, 2.0, "b")
    assert calendar.first_room(NOW, 9.0, 0.5, "a", 0.0) == 15
    others = DrainCalendar()
    others.num_gateways = 4
    assert others.first_room(NOW, 9.0, 0.5, "a", 0.0) == 12


def test_bookings_spread_evenly_over_the_horizon() -> None:
    waits = booked_until_full(DrainCalendar(), "a", 0.1)
    assert waits == sorted(waits)
    per_second = [waits.count(second) for second in range(2, HORIZON_S + 1)]
    assert min(per_second) >= 6
    assert max(per_second) <= 10
    assert sum(per_second) == pytest.approx(HORIZON_S * FILL_OF_DOMINANT * 10, rel=0.05)


def test_no_room_within_the_horizon_is_none_and_says_how_far() -> None:
    calendar = DrainCalendar()
    assert calendar.first_room(NOW, 70.0, 1.0, "a", 0.0) is None
    assert calendar.late_turn_s(NOW, 70.0, 1.0, "a", 0.0) == pytest.approx(71 / FILL)
    assert calendar.first_room(NOW, 0.0, 1.0, "a", 60.0) is None


def test_tenant_who_has_booked_most_leaves_room_for_others_in_every_second() -> None:
    calendar = DrainCalendar()
    booked_until_full(calendar, "hog", 0.1)
    assert calendar.first_room(NOW, 0.0, 0.1, "hog", 0.0) is None
    waits = booked_until_full(calendar, "small", 0.1)
    assert waits[0] <= 3
    assert len(waits) == pytest.approx(HORIZON_S * (FILL - FILL_OF_DOMINANT) * 10, rel=0.1)


def test_newcomer_is_let_in_only_if_every_booking_can_still_be_kept() -> None:
    calendar = DrainCalendar()
    assert calendar.has_room_now(NOW, 0.0, 5.0, "a", 0.0)
    calendar.book(NOW + 2, 1.5, "b")
    assert not calendar.has_room_now(NOW, 0.0, 0.5, "a", 0.0)
    assert calendar.has_room_now(NOW, -1.0, 0.5, "a", 0.0)
    assert not calendar.has_room_now(NOW, 0.1, 0.0, "a", 0.0)
    assert not DrainCalendar().has_room_now(NOW, 0.1, 0.0, "a", 0.0)
    # What was promised for earlier and has not come yet still counts.
    assert not calendar.has_room_now(NOW + 3, -1.0, 0.5, "a", 0.0)
    # Even where the next second has room for both.
    assert not calendar.has_room_now(NOW + 3, -1.5, 0.1, "a", 0.0)
    assert calendar.has_room_now(NOW + 3, -1.6, 0.1, "a", 0.0)
    calendar.free(NOW + 2, 1.5, "b")
    assert calendar.is_empty


def test_idle_fleet_takes_a_newcomer_beside_what_is_promised_for_later_but_not_for_now() -> None:
    calendar = DrainCalendar()
    calendar.book(NOW + 1, 2.0, "b")
    assert not calendar.is_free_soon(NOW, -2.9, 1.0)
    assert calendar.is_free_soon(NOW, -3.0, 1.0)
    calendar.book(NOW + 2, 2.0, "b")
    assert calendar.is_free_soon(NOW, -3.0, 1.0)
    calendar.num_gateways = 2
    assert not calendar.is_free_soon(NOW, -5.9, 1.0)
    assert calendar.is_free_soon(NOW, -6.0, 1.0)


def test_gateways_that_do_not_see_each_other_promise_a_share_each() -> None:
    alone, one_of_four = DrainCalendar(), DrainCalendar()
    one_of_four.num_gateways = 4
    whole, quarter = (len(booked_until_full(calendar, "a", 0.1)) for calendar in (alone, one_of_four))
    assert quarter == pytest.approx(whole / 4, rel=0.05)


def test_newcomer_at_one_of_several_gateways_leaves_room_for_those_of_the_others_and_for_its_line() -> None:
    calendar = DrainCalendar()
    calendar.num_gateways = 4
    last_s = HORIZON_S * FILL
    assert calendar.has_room_now(NOW, -100.0, 1.0, "a", last_s + 100.0 - 4.1)
    assert not calendar.has_room_now(NOW, -100.0, 1.0, "a", last_s + 100.0 - 3.9)


@given(
    excess_s=st.floats(-20, 40),
    requests=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 3.0)), max_size=60),
)
def test_whatever_is_booked_the_work_of_no_second_exceeds_what_has_drained_by_then(
    excess_s: float, requests: list[tuple[str, float]]
) -> None:
    calendar = DrainCalendar()
    booked: list[tuple[int, float, str]] = []
    for tenant, cost_s in requests:
        wait_s = calendar.first_room(NOW, excess_s, cost_s, tenant, 0.0)
        if wait_s is not None:
            calendar.book(NOW + wait_s, cost_s, tenant)
            booked.append((wait_s, cost_s, tenant))
    for second in {wait_s for wait_s, _, _ in booked}:
        work_s = sum(cost_s for wait_s, cost_s, _ in booked if wait_s <= second)
        assert excess_s + work_s <= FILL * second + 1e-6
    for wait_s, cost_s, tenant in booked:
        calendar.free(NOW + wait_s, cost_s, tenant)
    assert calendar.is_empty
    assert not calendar._by_tenant
