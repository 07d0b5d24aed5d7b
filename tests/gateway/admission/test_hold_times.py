"""How long holders keep limited places, and when the next one is expected to be free."""

from __future__ import annotations

import pytest

from gateway.admission.hold_times import MAX_WAIT_S, AnswerPlaces, HoldTimes
from gateway.errors import ApiError
from tests.clock import Clock


@pytest.fixture
def holds() -> HoldTimes:
    return HoldTimes()


def test_time_that_requests_run_is_a_running_mean(holds: HoldTimes) -> None:
    assert holds.mean_s(5.0) == 0.0
    holds.begin("a", 10.0)
    holds.begin("b", 12.0)
    # None has ended: twice what the oldest has run.
    assert holds.mean_s(15.0) == 10.0
    holds.end("b", 16.0)
    assert holds.mean_s(99.0) == 4.0
    holds.end("a", 24.0)
    assert holds.mean_s(99.0) == pytest.approx(4.0 + 0.2 * 10.0)
    holds.begin("c", 50.0)
    holds.end("c", 40.0)
    assert holds.mean_s(99.0) == pytest.approx(6.0 - 0.2 * 6.0)


@pytest.mark.parametrize(
    ("missing", "running", "wait_s"),
    [
        # Two sequences began at 0 and one at 4; each runs 10 s; it is 5.
        (1, 3, 5.0),
        (2, 3, 10.0 * 2 / 3),
        (3, 3, 10.0),
        (3, 30, 9.0),
        (4, 30, 9.0),
        (1, 0, 10.0),
        (9, 1, MAX_WAIT_S),
    ],
)
def test_place_is_expected_when_enough_have_ended(holds: HoldTimes, missing: int, running: int, wait_s: float) -> None:
    holds.begin("a", 0.0, 2)
    holds.begin("b", 4.0)
    assert holds.wait_s(5.0, missing, running, 10.0) == pytest.approx(wait_s)


def test_all_places_of_a_holder_come_back_together(holds: HoldTimes) -> None:
    holds.begin("a", 0.0, 3)
    holds.begin("b", 0.0)
    assert (holds.end("a", 1.0), holds.num_held, holds.is_empty) == (3, 1, False)
    assert (holds.end("b", 1.0), holds.num_held, holds.is_empty) == (1, 0, True)


def test_no_client_is_told_to_come_back_at_once(holds: HoldTimes) -> None:
    holds.begin("short", 0.0)
    holds.end("short", 0.1)
    holds.begin("a", 0.0)
    assert holds.retry_after_s(5.0) == 1.0


def test_place_that_is_overdue_is_expected_at_once(holds: HoldTimes) -> None:
    holds.begin("a", 0.0)
    assert holds.wait_s(50.0, 0, 1, 10.0) == 0.0
    assert holds.wait_s(50.0, 1, 10, 10.0) == 1.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(places: AnswerPlaces, key_id: str) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        places.take(key_id)
    assert refusal.value.code == "too_many_streams"
    return refusal.value


def test_key_with_its_share_is_told_when_one_of_its_answers_is_expected_to_end(clock: Clock) -> None:
    places = AnswerPlaces(8, clock)
    for _ in range(7):
        places.take("busy")
        clock.now += 1
    # None has ended: the oldest, 7 s old, is thought to be in its middle.
    error = refused(places, "busy")
    assert (error.status, error.retry_after_s) == (429, 7.0)
    assert "in 7 s" in error.message
    # The last place is another key's; then all are taken for any key.
    places.take("other")
    assert refused(places, "third").status == 503


def test_wait_follows_how_long_answers_took(clock: Clock) -> None:
    places = AnswerPlaces(2, clock)
    ended, _ = places.take("a"), places.take("b")
    clock.now += 10
    places.give_back("a", ended)
    places.take("a")
    clock.now += 1
    # Of two that take 10 s each, one ends every 5 s.
    error = refused(places, "c")
    assert (error.status, error.retry_after_s) == (503, 5.0)


def test_what_a_key_once_took_is_forgotten_with_its_last_answer(clock: Clock) -> None:
    places = AnswerPlaces(2, clock)
    once = places.take("a")
    clock.now += 50
    places.give_back("a", once)
    places.take("a")
    clock.now += 3
    assert (refused(places, "a").status, refused(places, "a").retry_after_s) == (429, 6.0)


def test_text_and_header_say_the_same_whole_seconds(clock: Clock) -> None:
    places = AnswerPlaces(1, clock)
    places.take("a")
    clock.now += 6.2
    error = refused(places, "b")
    assert dict(error.response_headers())[b"retry-after"] == b"13"
    assert "in 13 s" in error.message


def test_all_places_are_free_again_once_given_back(clock: Clock) -> None:
    places = AnswerPlaces(3, clock)
    for _ in range(4):
        taken = [(key, places.take(key)) for key in ("a", "b", "c")]
        assert places._shares.used == 3
        for key, place in taken:
            places.give_back(key, place)
        assert places._shares.used == 0
