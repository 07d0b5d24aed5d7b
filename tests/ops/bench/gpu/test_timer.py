"""The device's timer, with the device's two functions replaced: how often it calls, and what it makes of samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ops.bench.gpu import timer
from ops.bench.gpu.case import Clock
from ops.bench.gpu.timer import CudaTimer, Timing


class Device:
    """Takes `seconds` for a call; notes the input sets of the calls, and what was captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.seconds = seconds
        self.indices: list[int] = []
        self.num_captured = 0
        monkeypatch.setattr(timer, "_elapsed", self.elapsed)
        monkeypatch.setattr(timer, "_captured", self.captured)

    def call(self, index: int) -> None:
        self.indices.append(index)

    def elapsed(self, run: Callable[[], object]) -> float:
        before = len(self.indices)
        run()
        return self.seconds * (len(self.indices) - before)

    def captured(self, calls: Callable[[], None]) -> tuple[Callable[[], object], bool]:
        self.num_captured += 1
        return calls, True


def test_time_is_that_of_one_call_and_every_set_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 1e-3)
    timing = CudaTimer().measure(device.call, 3)
    assert timing.seconds == pytest.approx(1e-3)
    assert (timing.is_graphed, device.num_captured) == (True, 1)
    timed = device.indices[4:]
    assert timed.count(0) == timed.count(1) == timed.count(2) == 15 * 2


def test_calls_between_events_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 1e-3)
    assert not CudaTimer().measure(device.call, 1, Clock.EVENTS).is_graphed
    assert device.num_captured == 0


def test_long_calls_are_made_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 0.9)
    CudaTimer().measure(device.call, 1)
    assert len(device.indices) == 3 + 1 + 5


def test_timing_is_the_median_and_the_middle_half() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0, 3.0, 3.0])
    assert (timing.seconds, timing.spread) == (3.0, 1 / 3)
    assert Timing.of([7.0]) == Timing(7.0, 0.0, is_graphed=False)
