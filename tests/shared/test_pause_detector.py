from __future__ import annotations

import pytest

from shared.pause_detector import PauseDetector, boot_time


class Clocks:
    """The two clocks of a machine that a test can stop and suspend."""

    def __init__(self) -> None:
        self.monotonic = 100.0
        self.boot = 5000.0
        self.cpu = 3.0

    def run(self, seconds: float, busy_s: float = 0.0) -> None:
        self.monotonic += seconds
        self.boot += seconds
        self.cpu += busy_s

    def suspend(self, seconds: float) -> None:
        self.boot += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def detector(clocks: Clocks) -> PauseDetector:
    return PauseDetector(0.1, 0.25, lambda: clocks.monotonic, lambda: clocks.boot, lambda: clocks.cpu)


def test_rounds_on_time_and_a_little_late_are_no_pause(clocks: Clocks, detector: PauseDetector) -> None:
    for delay_s in (0.1, 0.1, 0.3, 0.34, 0.05):
        clocks.run(delay_s)
        assert not detector.tick()


def test_late_round_follows_a_pause_of_that_length(clocks: Clocks, detector: PauseDetector) -> None:
    clocks.run(6.1)
    assert detector.tick()
    assert detector.lost_s == pytest.approx(6.0)
    clocks.run(0.1)
    assert not detector.tick()


@pytest.mark.parametrize("busy_s", [0.0, 5.9])
def test_pause_tells_a_blocked_thread_from_a_machine_without_time(
    clocks: Clocks, detector: PauseDetector, busy_s: float
) -> None:
    clocks.run(0.1, busy_s=0.1)
    detector.tick()
    clocks.run(6.1, busy_s)
    assert detector.tick()
    assert detector.busy_s == pytest.approx(busy_s)


def test_suspension_is_a_pause_although_one_clock_stood_still(clocks: Clocks, detector: PauseDetector) -> None:
    clocks.run(0.1)
    clocks.suspend(600)
    assert detector.tick()
    assert detector.lost_s == 0.0


def test_clock_of_the_machine_counts_on() -> None:
    before = boot_time()
    assert boot_time() >= before > 0
