"""How long holders keep limited places, and when the next one is expected to be free."""

from __future__ import annotations

import pytest

from gateway.admission.hold_times import MAX_WAIT_S, HoldTimes


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


def test_nobody_is_told_to_come_back_at_once(holds: HoldTimes) -> None:
    holds.begin("short", 0.0)
    holds.end("short", 0.1)
    holds.begin("a", 0.0)
    assert holds.retry_after_s(5.0) == 1.0


def test_place_that_is_overdue_is_expected_at_once(holds: HoldTimes) -> None:
    holds.begin("a", 0.0)
    assert holds.wait_s(50.0, 0, 1, 10.0) == 0.0
    assert holds.wait_s(50.0, 1, 10, 10.0) == 1.0
