from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.simulation.autoscaler import Scaling
from ops.simulation.scenario import Scenario
from ops.simulation.step_time import LinearTimes, StepTimes
from ops.simulation.workload import Arrival
from tests.ops.simulation.fleets import served

# A worker serves 4 / 0.08 / 64 = 0.78 of these requests a second.
CONFIG = SchedulerConfig(16, 1000, 4, 512, 4096)
FLAT = StepTimes(LinearTimes(0.08))
# A compute-bound worker, which is nearly full before its slots are: 0.86 requests a second with four, 0.72 with one.
STEEP = StepTimes(LinearTimes(0.002, sequence_s=0.0176))
PLAIN = Scenario(1, CONFIG, FLAT, max_retries=0)
SCALING = Scaling(most=8, start_s=30.0, every_s=5.0, leave_every_s=20.0)


def day(peak: float) -> Iterator[Arrival]:
    """Rise to a peak, stay there and fall to a low rate for longer than workers are kept."""
    draw, at = random.Random(5), 0.0
    for until, first, last in ((60, 0.3, 0.3), (360, 0.3, peak), (480, peak, peak), (540, peak, 0.1), (1000, 0.1, 0.1)):
        start = at
        while at < until:
            rate = first + (last - first) * (at - start) / (until - start)
            at += draw.expovariate(rate)
            yield Arrival(at, 64, 64)


@pytest.mark.parametrize("times", [pytest.param(FLAT, marks=pytest.mark.slow), STEEP])
def test_fleet_grows_before_requests_are_refused_and_shrinks_without_losing_one(times: StepTimes) -> None:
    fixed = served(day(2.0), PLAIN, times=times)
    assert fixed.num_refusals > 100
    scaled = served(day(2.0), PLAIN, times=times, scaling=SCALING)
    assert (scaled.num_refusals, scaled.num_unserved, scaled.num_served) == (0, 0, scaled.num_requests)
    assert scaled.ttft_s[99] < PLAIN.ttft_slo_s
    assert max(scaled.workers) >= 3
    assert scaled.workers[-1] == 1
    # It did not change its mind: up once, down once.
    largest = scaled.workers.index(max(scaled.workers))
    grows, shrinks = scaled.workers[: largest + 1], scaled.workers[largest:]
    assert grows == sorted(grows)
    assert shrinks == sorted(shrinks, reverse=True)


def test_fleet_is_no_larger_than_its_work() -> None:
    scaled = served(day(0.4), PLAIN, scaling=SCALING)
    assert max(scaled.workers) <= 2
