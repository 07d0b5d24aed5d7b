"""What one gateway process counts, and how Prometheus reads it.

The hot path only adds to plain attributes and dict entries; Prometheus objects are made for a scrape. The one
writer is the event loop's thread. Nothing is registered globally: the code that serves `/metrics` passes a registry.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gateway.telemetry.answer_counts import AnswerCounts
from gateway.telemetry.model_metrics import RequestMetrics
from gateway.telemetry.row import MetricRow, add
from shared.process_usage import resident_bytes
from shared.usage_ledger import UsageLedger
from shared.worker_metrics import Histogram

MoveReason = Literal[
    "worker_dead",
    "gap",
    "handoff",
    "prefilled",
    "silent",
    "waiting",
    "unclaimed",
    "nats_restart",
    "cancelled",
    "early",
]
"""Why attempts end without an answer, and others are made."""

ERROR_BUCKETS_S = (-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
REASONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "shed": ("overloaded", "queue_full", "no_worker", "waking"),
        "limited": ("requests", "tokens", "concurrency", "reads"),
        "promises": ("made", "kept", "broken", "unused"),
        "redispatches": get_args(MoveReason),
        "sequences": ("completed", "failed", "cancelled"),
        "dead_letters": ("worker_lost", "attempts_exhausted"),
    }
)
RETRY_ERROR_BUCKETS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)


class GatewayMetrics:
    """The numbers of one gateway process. Add to the attributes directly.

    Attributes:
        requests: By (route, status). Routes are our own names, never the client's path.
        retry_after_error_s: Seconds that clients waited beyond the promised time; 0 for promises that were kept.
        by_model: Measurements of each model's requests.
        usage: Counts per tenant, which NATS adds up.
        canary_requests: By alias, its tenant, arm and outcome.
        canary_rollbacks: By the measure that was worse.

    The others are counters and gauges of `ROWS`; see there.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.shed, self.limited, self.promises, self.redispatches, self.sequences, self.dead_letters = (
            # Each known reason is there from the start: Prometheus sees no increase in what begins with a 1.
            Counter(dict.fromkeys(REASONS[name], 0))
            for name in ("shed", "limited", "promises", "redispatches", "sequences", "dead_letters")
        )
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.completion_tokens = 0
        self.active_streams = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self.connections = 0
        self.connections_evicted = 0
        self.connections_limited = 0
        self.disconnects = 0
        self.slow_readers = 0
        self.batches_created = 0
        self.batches_driven = 0
        self.batches_taken_over = 0
        self.file_bytes_uploaded = 0
        self.file_bytes_downloaded = 0
        self.file_store_failures = 0
        self.redis_failures = 0
        self.is_redis_open = False
        self.is_keys_file_unread = False
        self.is_nats_connected = False
        self.nats_disconnects = 0
        self.key_reload_failures = 0
        self.prediction_error_s = Histogram(ERROR_BUCKETS_S)
        self.retry_after_error_s = Histogram(RETRY_ERROR_BUCKETS_S)
        self.by_model = RequestMetrics()
        self.usage = UsageLedger("interactive")
        self.answers = AnswerCounts()
        self.canary_requests: Counter[tuple[str, str, str, str]] = Counter()
        self.canary_rollbacks = Counter(dict.fromkeys(("errors", "ttft", "itl", "logprob"), 0))


_COUNTERS = {
    "prompt_tokens": "Prompt tokens of answers, repeated ones and those that clients left included.",
    "cached_prompt_tokens": "Those of them that were found in a worker's prefix cache.",
    "completion_tokens": "Generated tokens of answers; of one that its client left, those delivered until then.",
    "cache_hits": "Answers taken from the response cache.",
    "cache_misses": "Response cache lookups that found nothing.",
    "connections_evicted": "Waiting connections closed to make room for others.",
    "connections_limited": "Connections beyond the limit, which were served health alone.",
    "disconnects": "Requests whose client left early.",
    "slow_readers": "Clients cut because they did not read.",
    "redis_failures": "Redis calls that failed or came too late.",
    "nats_disconnects": "Times that the connection to NATS was lost.",
    "batches_created": "Batches made at `/v1/batches`.",
    "batches_taken_over": "Batches that this gateway drives because the gateway that drove them fell silent.",
    "file_bytes_uploaded": "Bytes of files stored at `/v1/files`.",
    "file_bytes_downloaded": "Bytes of files sent to clients.",
    "file_store_failures": "Reads and writes of files that the store refused: it is full, or cannot be reached.",
    "key_reload_failures": "Times the changed key file could not be read.",
}
_GAUGES = {
    "active_streams": "Requests being answered.",
    "batches_driven": "Batches whose lines this gateway puts into the queue and collects.",
    "connections": "Open client connections.",
    "is_keys_file_unread": "1: the key file has changed and cannot be read: the keys of before stay in force.",
    "is_redis_open": "1: Redis is away.",
    "is_nats_connected": "1: the connection to NATS is up.",
}
_BY_REASON = {
    "shed": "Requests refused for lack of capacity: `overloaded`, `queue_full`, `no_worker`, `waking`.",
    "promises": "Places kept for refused requests (`made`), and what became of them: `kept`, `broken`, `unused`.",
    "limited": "Requests refused because a key exceeded a limit: `requests`, `tokens`, `concurrency`, `reads`.",
    "redispatches": "Sequences moved to another worker: `worker_dead`, `gap`, `handoff`, ...",
    "sequences": "Sequences dispatched, by how they ended: `completed`, `failed`, `cancelled`.",
    "dead_letters": "Interactive requests put into quarantine: `worker_lost`, `attempts_exhausted`.",
}
_HISTOGRAMS = {
    "prediction_error_s": ("ttft_prediction_error_seconds", "Actual minus predicted time to first token."),
    "retry_after_error_s": (
        "retry_after_error_seconds",
        "How much longer than its `Retry-After` a client had to wait for its place: 0 for a promise that was kept.",
    ),
}
_OWN = ("process",)
_REQUESTS_ROW = MetricRow("headrace_requests_total", "counter", ("process", "route", "status"), "Answers.")
_CPU_ROW = MetricRow("headrace_process_cpu_seconds_total", "counter", _OWN, "Processor time of the gateway process.")
_MEMORY_ROW = MetricRow("headrace_process_resident_memory_bytes", "gauge", _OWN, "Memory of the gateway process.")
ROWS: Mapping[str, MetricRow] = MappingProxyType(
    {
        **{key: MetricRow(f"headrace_{key}_total", "counter", _OWN, text) for key, text in _COUNTERS.items()},
        **{key: MetricRow(f"headrace_{key}", "gauge", _OWN, text) for key, text in _GAUGES.items()},
        **{
            key: MetricRow(f"headrace_{key}_total", "counter", ("process", "reason"), text)
            for key, text in _BY_REASON.items()
        },
        **{key: MetricRow(f"headrace_{name}", "histogram", _OWN, text) for key, (name, text) in _HISTOGRAMS.items()},
    }
)
_CANARY_ROW = MetricRow(
    "headrace_canary_requests_total",
    "counter",
    ("process", "alias", "tenant", "arm", "outcome"),
    "Requests of aliases with a canary, by arm: `answered`, `failed`; the times of each arm's model are its own.",
)
_ROLLBACKS_ROW = MetricRow(
    "headrace_canary_rollbacks_total",
    "counter",
    ("process", "reason"),
    "Canaries that this process has rolled back: for `errors`, `ttft`, `itl`, `logprob`.",
)
OTHER_ROWS = (_REQUESTS_ROW, _CPU_ROW, _MEMORY_ROW, _CANARY_ROW, _ROLLBACKS_ROW)


class MetricsCollector(Collector):
    """Reads a `GatewayMetrics` when Prometheus scrapes."""

    def __init__(self, metrics: GatewayMetrics, process: int) -> None:
        self._metrics = metrics
        self._process = str(process)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        metrics, process = self._metrics, self._process
        requests = _REQUESTS_ROW.family()
        for (route, status), count in metrics.requests.items():
            add(requests, [process, route, str(status)], count)
        yield requests
        canaries, rollbacks = _CANARY_ROW.family(), _ROLLBACKS_ROW.family()
        for labels, count in metrics.canary_requests.items():
            add(canaries, [process, *labels], count)
        add(rollbacks, [process], metrics.canary_rollbacks)
        yield canaries
        yield rollbacks
        for attribute, row in ROWS.items():
            family = row.family()
            add(family, [process], getattr(metrics, attribute))
            yield family
        for row, value in ((_CPU_ROW, time.process_time()), (_MEMORY_ROW, resident_bytes())):
            family = row.family()
            add(family, [process], value)
            yield family
        yield from metrics.by_model.collect(process)


def make_registry(*collectors: Collector) -> CollectorRegistry:
    """Return a registry of these collectors' metrics and nothing else."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return registry
