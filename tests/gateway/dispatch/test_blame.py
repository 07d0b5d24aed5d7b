"""Who is suspected, who is to blame: deaths and flights are in memory."""

from __future__ import annotations

import pytest

from gateway.dispatch import blame
from gateway.dispatch.blame import HARMLESS_TOKENS, MAX_SOLO_LOSSES
from gateway.dispatch.inflight import Flight
from gateway.fleet.death import Death
from shared.messages import Request
from tests.gateway.dispatch_bench import ListSink


def flight(num_produced: int = 0, probation: int = 0) -> Flight:
    """Return a flight that had three tokens when its attempt began and has produced so many more."""
    result = Flight(Request(id="a", model="m", text="x"), ListSink(), 1, 0.0)
    result.start, result.emitted, result.probation = 3, [1] * (3 + num_produced), probation
    return result


def death(*, is_blamed: bool = True) -> Death:
    return Death("w", "m", "it is not there any more", 0.0, is_blamed)


@pytest.mark.parametrize(
    ("num_produced", "num_deaths", "probation"),
    [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 1),
        (1, 1, 0),
        (1, 2, HARMLESS_TOKENS),
        (HARMLESS_TOKENS - 1, 2, HARMLESS_TOKENS),
        (HARMLESS_TOKENS, 2, 0),
    ],
)
def test_probation_follows_what_was_produced_before_deaths(num_produced: int, num_deaths: int, probation: int) -> None:
    one = flight(num_produced)
    for _ in range(num_deaths):
        blame.note_death([one], death())
    assert blame.probation(one) == probation


def test_only_suspect_is_to_blame_and_its_neighbours_are_not() -> None:
    suspect, neighbour = flight(probation=1), flight(num_produced=1)
    for _ in range(MAX_SOLO_LOSSES):
        assert not blame.is_to_blame(suspect)
        blame.note_death([suspect, neighbour], death())
    assert blame.is_to_blame(suspect)
    assert not blame.is_to_blame(neighbour)


def test_suspect_beside_a_request_that_had_just_begun_is_not_to_blame() -> None:
    suspect = flight(probation=1)
    for _ in range(MAX_SOLO_LOSSES + 1):
        fresh = flight()
        blame.note_death([suspect, fresh], death())
        assert not blame.is_to_blame(fresh)
        assert blame.probation(fresh) == 1
    assert not blame.is_to_blame(suspect)


def test_two_suspects_on_one_worker_leave_it_open_who_is_to_blame() -> None:
    suspects = [flight(probation=1), flight(probation=1)]
    for _ in range(MAX_SOLO_LOSSES + 1):
        blame.note_death(suspects, death())
    assert not any(map(blame.is_to_blame, suspects))


def test_suspect_that_has_passed_its_probation_is_not_to_blame() -> None:
    passed = flight(num_produced=1, probation=1)
    for _ in range(MAX_SOLO_LOSSES + 1):
        blame.note_death([passed], death())
    assert not blame.is_to_blame(passed)


def test_deaths_that_were_taken_back_count_for_nothing() -> None:
    suspect, found = flight(probation=1), [death() for _ in range(MAX_SOLO_LOSSES)]
    for one in found:
        blame.note_death([suspect], one)
    assert blame.is_to_blame(suspect)
    found[0].is_blamed = False
    assert not blame.is_to_blame(suspect)
    found[1].is_blamed = False
    assert blame.probation(suspect) == 0


def test_death_after_which_an_unclaimed_request_was_gone_counts_once() -> None:
    one, known = flight(), death()
    for _ in range(3):
        blame.note_swallowed(one, [known])
    assert len(one.losses) == 1
    assert blame.probation(one) == 1
    assert not blame.is_to_blame(one)


def test_attempt_that_lives_long_enough_clears_what_was_before() -> None:
    one = flight(num_produced=1)
    blame.note_death([one], death())
    one.emitted += [1] * HARMLESS_TOKENS
    blame.note_death([one], death())
    one.start = len(one.emitted) - 1
    blame.note_death([one], death())
    assert blame.probation(one) == 0
