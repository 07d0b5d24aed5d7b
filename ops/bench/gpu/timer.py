"""Time of a call on the device, without the host's where that can be had, and what the device can do at best.

Calls are timed by graph replays between two events. Ceilings are measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ops.bench.gpu.case import Case, Clock

_GRAPH_SECONDS = 4e-3
_MAX_CALLS = 256
_NUM_SAMPLES = 15
_MIN_SAMPLES = 5
# Of samples alone: a call of a second is not made thirty times.
_MAX_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of a call, and the spread: the middle half of the samples over the median.

    `is_graphed` is False where a graph could not be captured; the host's time may then show.
    """

    seconds: float
    spread: float
    is_graphed: bool

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:.1f}{'' if self.is_graphed else '*'}"

    def row(self) -> dict[str, object]:
        """Return the fields to record."""
        return {"us": round(self.seconds * 1e6, 3), "spread": round(self.spread, 4), "is_graphed": self.is_graphed}

    @classmethod
    def of(cls, seconds: Sequence[float], is_graphed: bool = False) -> Timing:
        """Summarise samples."""
        samples = sorted(seconds)
        median = statistics.median(samples)
        quarter = len(samples) // 4
        return cls(median, (samples[-1 - quarter] - samples[quarter]) / median, is_graphed)


class Timer(Protocol):
    """Times a call that takes the number of an input set."""

    def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
        """Return the time of one call, its input sets taken in turn; `clock` is GRAPH or EVENTS."""


class CudaTimer:
    """Times by replaying a CUDA graph of many calls."""

    def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
        """Warm up, capture if so wanted, run, and return the median."""
        for index in range(3):
            call(index % num_sets)
        rough = _elapsed(lambda: call(0))
        num_calls = max(num_sets, min(_MAX_CALLS, int(_GRAPH_SECONDS / rough) + 1))
        # Whole rounds through the sets, so that each counts the same.
        num_calls = -(-num_calls // num_sets) * num_sets

        def calls() -> None:
            for index in range(num_calls):
                call(index % num_sets)

        run, is_graphed = _captured(calls) if clock is Clock.GRAPH else (calls, False)
        # A sample runs twice, and only the second run counts.
        num_samples = min(_NUM_SAMPLES, max(_MIN_SAMPLES, int(_MAX_SECONDS / (2 * rough * num_calls))))
        return Timing.of([_elapsed(run) / num_calls for _ in range(num_samples)], is_graphed)


def _captured(calls: Callable[[], None]) -> tuple[Callable[[], object], bool]:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError:
        torch.cuda.synchronize()
        return calls, False
    return graph.replay, True


def _elapsed(run: Callable[[], object]) -> float:
    start: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    run()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


_COPY_BYTES = 4 * 2**30
_MATRIX_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of the device.

    Attributes:
        bandwidth: Bytes a second of a large copy, read and written counted. Fractions are of this one.
        read_bandwidth: Bytes a second of a large sum, which writes nothing: what a decode comes closest to.
        matmul_rate: Operations a second of a large bf16 product of random numbers.
    """

    bandwidth: float
    read_bandwidth: float
    matmul_rate: float

    def floor_s(self, case: Case) -> float:
        """Return the seconds that a case takes at least."""
        return max(case.num_bytes / self.bandwidth, case.num_flops / self.matmul_rate)


def measure_ceilings(timer: Timer, device: torch.device) -> Ceilings:
    """Copy, read, and multiply."""
    source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = timer.measure(lambda _: target.copy_(source), 1).seconds
    ones = torch.ones(_COPY_BYTES // 4, device=device)
    read_s = timer.measure(lambda _: ones.sum(), 1).seconds
    left, right = torch.randn(2, _MATRIX_SIZE, _MATRIX_SIZE, device=device).bfloat16()
    matmul_s = timer.measure(lambda _: left @ right, 1).seconds
    return Ceilings(2 * _COPY_BYTES / copy_s, _COPY_BYTES / read_s, 2 * _MATRIX_SIZE**3 / matmul_s)
