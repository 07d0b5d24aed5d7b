"""A scenario to simulate, and its run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.simulation.fleet import VirtualFleet
from ops.simulation.gateway import Progress, VirtualGateway
from ops.simulation.outcome import Outcome
from ops.simulation.step_time import StepTimes
from ops.simulation.tiers import TierSizes
from ops.simulation.workload import Arrival


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet, and how its clients behave.

    Attributes:
        ttft_slo_s: Requests whose predicted time to first token is longer are refused.
        latency_s: Time of a request besides queue and steps.
        max_retries: How often a refused client comes back.
        kills: Workers that die, by number, and when.
        is_affine: Requests wait for the worker that holds their prefix.
        tiers: KV tiers below the devices' memory; None for device memory alone.
    """

    workers: int
    config: SchedulerConfig
    times: StepTimes
    ttft_slo_s: float = 10.0
    latency_s: float = 0.0
    max_retries: int = 2
    kills: tuple[tuple[int, float], ...] = ()
    is_affine: bool = False
    seed: int = 0
    tiers: TierSizes | None = None


def simulate(
    scenario: Scenario, arrivals: Iterator[Arrival], report: Callable[[Progress], None] | None = None
) -> Outcome:
    """Serve requests by a fleet in virtual time; `report` is called with each heartbeat."""
    config = scenario.config
    fleet = VirtualFleet(
        scenario.workers,
        config,
        scenario.times,
        is_affine=scenario.is_affine,
        seed=scenario.seed,
        tiers=scenario.tiers,
    )
    gateway = VirtualGateway(
        fleet,
        config,
        ttft_slo_s=scenario.ttft_slo_s,
        latency_s=scenario.latency_s,
        max_retries=scenario.max_retries,
        seed=scenario.seed,
        report=report,
    )
    for number, at in scenario.kills:
        fleet.clock.call_at(at, fleet.workers[number].die)
    with _few_collections():
        gateway.serve(arrivals)
    outcome = gateway.outcome
    outcome.num_workers = len(fleet.workers)
    outcome.num_preemptions = sum(worker.engine.stats.num_preemptions for worker in fleet.workers)
    outcome.device_s = sum(worker.runner.device_s for worker in fleet.workers)
    outcome.gaps = dict(fleet.gaps.counts)
    return outcome


@contextmanager
def _few_collections() -> Iterator[None]:
    """Have the garbage collector scan new objects, and rarely the millions of small old ones."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
