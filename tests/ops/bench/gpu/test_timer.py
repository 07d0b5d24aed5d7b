"""The device's timer, with the device's two functions replaced: how often it calls, and what it makes of samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.bench.gpu import timer, trace
from ops.bench.gpu.case import Clock
from ops.bench.gpu.timer import CudaTimer, Timing
from ops.bench.gpu.trace import Span, StepTrace, summarise
from tests.ops.bench.gpu.step.tiny_models import LLAMA


class Device:
    """Takes `seconds` for a call; notes the input sets of the calls, and the captures."""

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


def test_kernels_are_added_up_and_gaps_are_where_none_runs() -> None:
    spans = [Span("a", 0, 10), Span("b", 12, 15), Span("a", 14, 20), Span("a", 25, 35)]
    assert summarise(spans, 1) == StepTrace({"a": (3, 26), "b": (1, 3)}, busy_us=28, gaps_us=7)
    assert summarise(spans, 2).kernels["a"] == (1.5, 13)


def test_kernel_within_another_takes_no_time_of_its_own() -> None:
    assert summarise([Span("a", 0, 10), Span("b", 2, 6), Span("a", 10, 11)], 1).busy_us == 11


def test_traced_step_is_printed_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(trace, "STEPS", {"tiny": (LLAMA, 2, "fp8")})
    assert trace.main(["--device", "cpu", "--step", "tiny", "--context", "20", "--replays", "2"]) == 0
    [row] = [json.loads(line) for line in (tmp_path / "gpu_trace.jsonl").read_text().splitlines()]
    assert (row["step"], row["layers"], row["device"]) == ("tiny", 2, "cpu")
    assert row["kernels"]
    assert row["busy_us"] > 0
    assert capsys.readouterr().out.startswith("tiny: ")


def test_without_a_gpu_nothing_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    if trace.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert trace.main(["--step", "8b_1"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
