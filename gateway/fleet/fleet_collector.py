"""The fleet for Prometheus, from the workers' heartbeats: models, workers, GPUs and the streams in NATS.

Every gateway knows all of it, and only the oldest that is alive shows it, so that a sum over gateways counts a worker
once. Where several processes share a port, that one shows it on the board of all.

A scrape holds up the gateway's streams while it is written, so its size is bounded, whatever heartbeats claim: shown
are the workers that were heard of first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import msgspec
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet.fleet import Fleet
from gateway.fleet.worker_needs import WorkerNeeds
from gateway.telemetry import worker_rows
from gateway.telemetry.row import MetricRow, add
from gateway.telemetry.stream_watch import STREAM_ROWS, StreamWatch, UsageWatch
from shared.messages import Heartbeat
from shared.worker_metrics import (
    STEP_SECONDS_BOUNDS,
    STEP_TOKENS_BOUNDS,
    HistogramCounts,
    KvTierReading,
    WorkerMetrics,
    cumulative,
)

_FLEET = ("model",)
FLEET_ROWS = {
    "num_workers": MetricRow("headrace_fleet_workers", "gauge", _FLEET, "Live workers that take requests."),
    "running": MetricRow("headrace_fleet_running", "gauge", _FLEET, "Sequences in the workers' batches."),
    "queued_requests": MetricRow(
        "headrace_fleet_queued_requests", "gauge", _FLEET, "Requests waiting in workers or in the queue."
    ),
    "queued_tokens": MetricRow("headrace_fleet_queued_tokens", "gauge", _FLEET, "Prompt tokens of these."),
    "prefill_rate": MetricRow(
        "headrace_fleet_prefill_tokens_per_second", "gauge", _FLEET, "How fast prompts drain, as measured."
    ),
    "decode_rate": MetricRow(
        "headrace_fleet_decode_tokens_per_second", "gauge", _FLEET, "How fast full batches generate, as measured."
    ),
    "free_blocks": MetricRow(
        "headrace_fleet_free_blocks", "gauge", _FLEET, "KV blocks that a new sequence could have."
    ),
    "total_blocks": MetricRow("headrace_fleet_total_blocks", "gauge", _FLEET, "KV blocks."),
    "num_gateways": MetricRow("headrace_fleet_gateways", "gauge", _FLEET, "Gateways that are alive."),
}
DEPTH_ROW = MetricRow(
    "headrace_queue_depth",
    "gauge",
    ("model", "lane"),
    "Requests that wait, in the queue or in workers. Of the batch lane as of the workers' last deliveries.",
)
OLDEST_ROW = MetricRow(
    "headrace_queue_oldest_seconds",
    "gauge",
    ("process", "model", "lane"),
    "For how long the first request has waited that no worker has; each process tells of its own. In the batch lane: "
    "the age of the model's oldest job that is not finished, looked at every 30 seconds.",
)
NEEDED_ROW = MetricRow(
    "headrace_fleet_workers_needed",
    "gauge",
    ("model", "lane"),
    "How many workers the model should have now, for autoscalers to follow: the sum over lanes. It rises at once and "
    "falls after five minutes.",
)
_HOSTED = ("host", "model")
HOSTED_STATE_ROW = MetricRow(
    "headrace_hosted_model_state",
    "gauge",
    (*_HOSTED, "state"),
    "1 for the state that a model of a host is in: awake, loading, asleep, stopping, no_room or failed.",
)
HOSTED_LOAD_ROW = MetricRow(
    "headrace_hosted_model_load_seconds", "gauge", _HOSTED, "How long the last start of a model's worker took."
)
HOSTED_WAKES_ROW = MetricRow(
    "headrace_hosted_model_wakes_total", "counter", _HOSTED, "How often a model that sleeps when idle was loaded."
)
HOSTED_ROWS = (HOSTED_STATE_ROW, HOSTED_LOAD_ROW, HOSTED_WAKES_ROW)
EVERY_ROW = (*FLEET_ROWS.values(), DEPTH_ROW, OLDEST_ROW, NEEDED_ROW, *HOSTED_ROWS)

# Workers and models that one scrape lists singly: about half a second of a gateway's time at most.
MAX_WORKER_SAMPLES = 1 << 15
MAX_MODELS = 256

T = TypeVar("T")

_NOTHING = WorkerMetrics()
# Samples of a worker without GPUs and groups of blocks.
_OWN_SAMPLES = len(worker_rows.WORKER_ROWS) + len(STEP_TOKENS_BOUNDS) + len(STEP_SECONDS_BOUNDS) + 10


class FleetCollector(Collector):
    """Reads the fleet when Prometheus scrapes."""

    def __init__(
        self,
        fleet: Fleet,
        oldest_unclaimed_s: Callable[[], dict[str, float]],
        streams: StreamWatch,
        usage: UsageWatch,
        needs: WorkerNeeds,
        process: int,
    ) -> None:
        self._usage = usage
        self._needs = needs
        self._fleet = fleet
        self._oldest_unclaimed_s = oldest_unclaimed_s
        self._streams = streams
        self._process = str(process)

    def collect(self) -> Iterator[Metric]:
        """Yield what this process alone knows, and the whole fleet if it is the one to show it."""
        oldest = OLDEST_ROW.family()
        for model, seconds in self._oldest_unclaimed_s().items():
            add(oldest, [self._process, model, "interactive"], seconds)
        if not self._fleet.is_eldest:
            yield oldest
            return
        workers = _shown(self._fleet.workers())
        by_model: dict[str, list[WorkerMetrics]] = {}
        for beat, metrics in workers:
            by_model.setdefault(beat.model, []).append(metrics)
        by_model = dict(sorted(list(by_model.items())[:MAX_MODELS]))
        for model, own in by_model.items():
            add(oldest, [self._process, model, "batch"], max(metrics.batch_oldest_s for metrics in own))
        yield oldest
        yield from self._models(by_model)
        yield self._needed()
        yield from self._hosted()
        yield from _workers(workers)
        yield from _parts(workers)
        yield from self._streams_families()
        yield from self._usage.collect()

    def _models(self, by_model: dict[str, list[WorkerMetrics]]) -> Iterator[Metric]:
        loads = [load for model in by_model if (load := self._fleet.load(model)) is not None]
        for attribute, row in FLEET_ROWS.items():
            family = row.family()
            for load in loads:
                add(family, [load.model], getattr(load, attribute))
            yield family
        depth = DEPTH_ROW.family()
        for load in loads:
            own = by_model[load.model]
            waiting_batch = sum(metrics.waiting_batch for metrics in own)
            pending = max((metrics.batch_pending for metrics in own), default=0)
            add(depth, [load.model, "interactive"], load.queued_requests)
            add(depth, [load.model, "batch"], waiting_batch + pending)
        yield depth

    def _needed(self) -> Metric:
        family = NEEDED_ROW.family()
        for model, need in list(self._needs.latest.items())[:MAX_MODELS]:
            for lane, workers in need.lanes.items():
                add(family, [model, lane], workers)
        return family

    def _hosted(self) -> Iterator[Metric]:
        state, load, wakes = (row.family() for row in HOSTED_ROWS)
        found = ((beat.host, model) for beat in self._fleet.hosted.beats() for model in beat.models)
        for host, model in islice(found, MAX_MODELS):
            add(state, [host, model.name, model.state], 1)
            add(wakes, [host, model.name], model.wakes)
            if model.load_s is not None:
                add(load, [host, model.name], model.load_s)
        yield from (state, load, wakes)

    def _streams_families(self) -> Iterator[Metric]:
        for attribute, row in STREAM_ROWS.items():
            family = row.family()
            for name, state in self._streams.states.items():
                add(family, [name], getattr(state, attribute))
            yield family


def _shown(beats: Iterable[Heartbeat]) -> list[tuple[Heartbeat, WorkerMetrics]]:
    """Return the workers that fit into a scrape, as they were first heard, each name of a GPU or group once."""
    shown, num_samples = [], 0
    for beat in beats:
        metrics = beat.metrics or _NOTHING
        num_samples += _OWN_SAMPLES + len(metrics.gpus) * len(worker_rows.GPU_ROWS) + 2 * len(metrics.kv_groups)
        num_samples += len(metrics.ranks) * len(worker_rows.RANK_ROWS)
        num_samples += len(metrics.kv_tiers) * len(worker_rows.TIER_ROWS)
        if num_samples > MAX_WORKER_SAMPLES:
            break
        shown.append((beat, _without_repetitions(metrics)))
    return shown


def _without_repetitions(metrics: WorkerMetrics) -> WorkerMetrics:
    """Return metrics whose GPUs, groups, ranks and tiers have names of their own: Prometheus takes no sample twice."""
    gpus = {reading.name: reading for reading in reversed(metrics.gpus)}
    groups = {group.name: group for group in reversed(metrics.kv_groups)}
    ranks = {reading.rank: reading for reading in reversed(metrics.ranks)}
    tiers = {tier.name: tier for tier in reversed(metrics.kv_tiers) if tier.name != "device"}
    num_listed = len(metrics.gpus) + len(metrics.kv_groups) + len(metrics.ranks) + len(metrics.kv_tiers)
    if len(gpus) + len(groups) + len(ranks) + len(tiers) == num_listed:
        return metrics
    return msgspec.structs.replace(
        metrics,
        gpus=tuple(reversed(gpus.values())),
        kv_groups=tuple(reversed(groups.values())),
        ranks=tuple(reversed(ranks.values())),
        kv_tiers=tuple(reversed(tiers.values())),
    )


def _workers(workers: list[tuple[Heartbeat, WorkerMetrics]]) -> Iterator[Metric]:
    for entry in worker_rows.WORKER_ROWS:
        family = entry.row.family()
        for beat, metrics in workers:
            add(family, [beat.model, beat.worker], entry.read(beat, metrics))
        yield family
    config, roles = worker_rows.CONFIG_ROW.family(), worker_rows.ROLE_ROW.family()
    redeliveries = worker_rows.REDELIVERIES_ROW.family()
    used, total = worker_rows.KV_USED_ROW.family(), worker_rows.KV_TOTAL_ROW.family()
    step_tokens, step_seconds = worker_rows.STEP_TOKENS_ROW.family(), worker_rows.STEP_SECONDS_ROW.family()
    for beat, metrics in workers:
        names = [beat.model, beat.worker]
        add(config, [*names, str(beat.block_size), str(beat.total_blocks)], 1)
        add(roles, [*names, "none" if beat.roles is None else beat.roles.role], 1)
        add(redeliveries, [*names, "interactive"], metrics.redelivered_interactive)
        add(redeliveries, [*names, "batch"], metrics.redelivered_batch)
        for group in metrics.kv_groups:
            add(used, [*names, group.name], group.used_blocks)
            add(total, [*names, group.name], group.total_blocks)
        _add_counts(step_tokens, names, metrics.step_tokens, STEP_TOKENS_BOUNDS)
        _add_counts(step_seconds, names, metrics.step_seconds, STEP_SECONDS_BOUNDS)
    yield from (config, roles, redeliveries, used, total, step_tokens, step_seconds)


def _parts(workers: list[tuple[Heartbeat, WorkerMetrics]]) -> Iterator[Metric]:
    yield from _of_parts(workers, worker_rows.GPU_ROWS, lambda m: [(gpu.name, gpu) for gpu in m.gpus])
    yield from _of_parts(workers, worker_rows.RANK_ROWS, lambda m: [(str(rank.rank), rank) for rank in m.ranks])
    hits, *others = worker_rows.TIER_ROWS
    yield from _of_parts(workers, [hits], lambda m: [(tier.name, tier) for tier in (_device(m), *m.kv_tiers)])
    yield from _of_parts(workers, others, lambda m: [(tier.name, tier) for tier in m.kv_tiers])


def _device(metrics: WorkerMetrics) -> KvTierReading:
    """Return the hits of the device's memory as those of a tier."""
    return KvTierReading("device", hit_tokens=metrics.device_hits)


def _of_parts(
    workers: list[tuple[Heartbeat, WorkerMetrics]],
    rows: list[worker_rows.PartRow[T]],
    parts: Callable[[WorkerMetrics], list[tuple[str, T]]],
) -> Iterator[Metric]:
    for part_row in rows:
        family = part_row.row.family()
        for beat, metrics in workers:
            for name, part in parts(metrics):
                if (value := part_row.read(part)) is not None:
                    add(family, [beat.model, beat.worker, name], value)
        yield family


def _add_counts(family: Metric, labels: list[str], counts: HistogramCounts | None, bounds: tuple[float, ...]) -> None:
    """Add a worker's histogram, unless it is of a version that has other buckets."""
    if counts is not None and len(counts.counts) == len(bounds) + 1:
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, cumulative(bounds, counts.counts), counts.total)
