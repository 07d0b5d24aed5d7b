from __future__ import annotations

import pytest

from gateway.admission.hold_times import AnswerPlaces
from gateway.errors import ApiError
from tests.clock import Clock


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
    # The last place is another key's; then all are taken, whoever asks.
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
        assert places.num_used == 3
        for key, place in taken:
            places.give_back(key, place)
        assert places.num_used == 0
