"""What is simulated, and what comes of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.simulation.autoscaler import Autoscaler, Scaling
from ops.simulation.fleet import VirtualFleet
from ops.simulation.gateway import Moment, VirtualGateway
from ops.simulation.outcome import TokenGaps, percentile
from ops.simulation.step_time import StepTimes
from ops.simulation.tiers import TierSizes
from ops.simulation.workload import Arrival

_PERCENTS = (50, 99)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet, and how its clients behave.

    Attributes:
        workers: How many.
        config: Of each worker's scheduler.
        times: Of each worker's steps.
        ttft_slo_s: Requests whose predicted time to first token is longer are refused.
        latency_s: What a request takes besides queue and steps.
        max_retries: How often a refused client comes back.
        kills: Workers that die, by number, and when.
        is_affine: Requests wait for the worker that holds their prefix.
        seed: Of all that is drawn.
        scaling: How the number of workers changes; None if it does not.
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
    scaling: Scaling | None = None
    tiers: TierSizes | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation has shown. Times are seconds.

    Attributes:
        duration_s: From the first request to the last one's end.
        ttft_s: Percentiles of the time to first token, from a client's first attempt on.
        itl_s: The same of the times between tokens.
        end_s: The same of whole answers.
        num_refusals: Attempts that were refused; `num_given_up` clients were refused for good.
        device_share: Share of the workers' time in which their devices computed.
        kv_share: Mean share of blocks in use; `most_kv_share` the largest of all heartbeats.
        moments: The fleet at each heartbeat.
        ttfts_s: Of every request, in the order of their ends.
    """

    num_requests: int
    num_served: int
    num_unserved: int
    num_too_long: int
    num_refusals: int
    num_given_up: int
    num_retried: int
    num_moves: int
    num_preemptions: int
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: dict[int, float]
    itl_s: dict[int, float]
    end_s: dict[int, float]
    device_share: float
    kv_share: float
    most_kv_share: float
    moments: list[Moment] = field(repr=False)
    ttfts_s: list[float] = field(repr=False)

    @property
    def workers(self) -> list[int]:
        """Workers that took requests, at each heartbeat."""
        return [moment.num_workers for moment in self.moments]

    @property
    def requests_per_s(self) -> float:
        """Requests that were served, each second."""
        return self.num_served / self.duration_s if self.duration_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens that were generated for them, each second."""
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def refused_share(self) -> float:
        """Share of all attempts that were refused."""
        num_attempts = self.num_refusals + self.num_served + self.num_unserved
        return self.num_refusals / num_attempts if num_attempts else 0.0


class Record(msgspec.Struct, kw_only=True):
    """What a fleet has shown, as it was counted: `Outcome` has the figures, and explains the names.

    Attributes:
        num_workers: Workers that there were.
        ttfts_s: Of every request, in the order of their ends, as `ends_s`.
        gaps: Times between tokens, as `TokenGaps` counts them.
        last_end_at: When the last request was complete.
    """

    num_workers: int
    num_unserved: int
    num_too_long: int
    num_refusals: int
    num_given_up: int
    num_retried: int
    num_moves: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    device_s: float
    ttfts_s: list[float]
    ends_s: list[float]
    gaps: dict[int, int]
    moments: list[Moment]
    last_end_at: float


def simulate(scenario: Scenario, arrivals: Iterator[Arrival]) -> Outcome:
    """Serve requests by a fleet in virtual time."""
    return outcome_of(run(scenario, arrivals))


def run(scenario: Scenario, arrivals: Iterator[Arrival]) -> Record:
    """Serve requests, and return what was counted."""
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
    )
    for number, at in scenario.kills:
        fleet.clock.call_at(at, fleet.workers[number].die)
    if scenario.scaling is not None:
        Autoscaler(gateway, scenario.scaling, scenario.ttft_slo_s)
    with _few_collections():
        gateway.serve(arrivals)
    return _record(fleet, gateway)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let the collector of cycles look at what is made, and seldom at what is kept: millions of small objects."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def _record(fleet: VirtualFleet, gateway: VirtualGateway) -> Record:
    served = gateway.served
    return Record(
        num_workers=len(fleet.workers),
        num_unserved=served.num_unserved,
        num_too_long=served.num_too_long,
        num_refusals=served.num_refusals,
        num_given_up=served.num_given_up,
        num_retried=served.num_retried,
        num_moves=served.num_moves,
        num_preemptions=sum(worker.engine.stats.num_preemptions for worker in fleet.workers),
        num_prompt_tokens=served.num_prompt_tokens,
        num_cached_tokens=served.num_cached_tokens,
        num_output_tokens=served.num_output_tokens,
        device_s=sum(worker.runner.device_s for worker in fleet.workers),
        ttfts_s=list(served.ttft_s),
        ends_s=list(served.end_s),
        gaps=dict(fleet.gaps.counts),
        moments=gateway.moments,
        last_end_at=served.last_end_at,
    )


def outcome_of(record: Record) -> Outcome:
    """Return the figures of what was counted."""
    duration_s, num_served = record.last_end_at, len(record.ttfts_s)
    busy = [moment for moment in record.moments if moment.at <= duration_s]
    gaps = TokenGaps(record.gaps)
    return Outcome(
        num_requests=num_served + record.num_given_up + record.num_unserved + record.num_too_long,
        num_served=num_served,
        num_unserved=record.num_unserved,
        num_too_long=record.num_too_long,
        num_refusals=record.num_refusals,
        num_given_up=record.num_given_up,
        num_retried=record.num_retried,
        num_moves=record.num_moves,
        num_preemptions=record.num_preemptions,
        duration_s=duration_s,
        num_prompt_tokens=record.num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_output_tokens=record.num_output_tokens,
        ttft_s={percent: percentile(record.ttfts_s, percent) for percent in _PERCENTS},
        itl_s={percent: gaps.percentile(percent) for percent in _PERCENTS},
        end_s={percent: percentile(record.ends_s, percent) for percent in _PERCENTS},
        device_share=record.device_s / (duration_s * record.num_workers) if duration_s else 0.0,
        kv_share=sum(moment.kv_share for moment in busy) / max(1, len(busy)),
        most_kv_share=max((moment.kv_share for moment in busy), default=0.0),
        moments=record.moments,
        ttfts_s=record.ttfts_s,
    )
