"""Small fleets for tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.simulation.outcome import Outcome
from ops.simulation.scenario import Scenario, simulate
from ops.simulation.step_time import LinearTimes, StepTimes
from ops.simulation.workload import Arrival, Synthetic

STEP_S = 0.01
CONFIG = SchedulerConfig(16, 1000, 8, 512, 4096)
PLAIN = Scenario(1, CONFIG, StepTimes(LinearTimes(STEP_S)))


def served(load: Synthetic | Iterable[Arrival], scenario: Scenario = PLAIN, **changes: Any) -> Outcome:
    arrivals = load.arrivals(7) if isinstance(load, Synthetic) else iter(load)
    return simulate(replace(scenario, **changes), arrivals)
