"""What one gateway process counts, and how Prometheus reads it.

The hot path only adds to plain attributes and dict entries; Prometheus objects are made when somebody asks. The one
writer is the event loop's thread. Nothing is registered globally: the code that serves `/metrics` passes a registry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ERROR_BUCKETS_S = (-10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Histogram:
    """Counts per bucket and their sum; `observe` is one bisection and three additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Count values into buckets with these upper bounds, and one more for the rest."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts under their upper bounds, as Prometheus wants them."""
        labels = [*(str(bound) for bound in self.bounds), "+Inf"]
        cumulative = 0
        result: list[tuple[str, float]] = []
        for label, count in zip(labels, self.counts, strict=True):
            cumulative += count
            result.append((label, cumulative))
        return result


class ConnectionCounts(Protocol):
    """What a server counts of its connections."""

    @property
    def members(self) -> Collection[object]:
        """The open ones."""
        ...

    @property
    def num_evicted(self) -> int:
        """Waiting ones closed to make room, since the start."""
        ...

    @property
    def num_limited(self) -> int:
        """Those beyond the limit, since the start."""
        ...


class GatewayMetrics:
    """The numbers of one gateway process. Add to the attributes directly.

    Attributes:
        requests: By (route, status). Routes are our own names, never the client's path.
        shed: Requests refused for lack of capacity, by reason (`overloaded`, `queue_full`, `no_worker`).
        promises: Places kept for refused requests: `made`, and what became of them: `kept`, `broken`, `unused`.
        limited: Requests refused with a 429, by limit (`requests`, `tokens`, `concurrency`).
        redispatches: Sequences sent to another worker, by reason (`worker_dead`, `gap`, `handoff`, ...).
        sequences: Sequences that were dispatched, by how they ended (`completed`, `failed`, `cancelled`).
        cache_hits, cache_misses, cache_shared: Response cache lookups; `shared` joined a generation in flight.
        connections: Open client connections, and how many were `connections_evicted` or `connections_limited` since the
            start, as of the last sweep.
        disconnects: Requests whose client left early; `slow_readers` were cut by us.
        redis_failures: Redis calls that failed or came too late; `is_redis_open` while the breaker is open.
        ttft_s: Time to first token, from the complete request to the first token's arrival.
        prediction_error_s: Actual minus predicted time to first token.
    """

    __slots__ = (
        "active_streams",
        "cache_hits",
        "cache_misses",
        "cache_shared",
        "cached_prompt_tokens",
        "completion_tokens",
        "connections",
        "connections_evicted",
        "connections_limited",
        "disconnects",
        "duration_s",
        "is_redis_open",
        "key_reload_failures",
        "limited",
        "prediction_error_s",
        "promises",
        "prompt_tokens",
        "redis_failures",
        "redispatches",
        "requests",
        "sequences",
        "shed",
        "slow_readers",
        "ttft_s",
    )

    def __init__(self) -> None:
        """Begin at zero."""
        self.requests: Counter[tuple[str, int]] = Counter()
        self.shed: Counter[str] = Counter()
        self.limited: Counter[str] = Counter()
        self.promises: Counter[str] = Counter()
        self.redispatches: Counter[str] = Counter()
        self.sequences: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.completion_tokens = 0
        self.active_streams = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self.cache_shared = 0
        self.connections = 0
        self.connections_evicted = 0
        self.connections_limited = 0
        self.disconnects = 0
        self.slow_readers = 0
        self.redis_failures = 0
        self.is_redis_open = False
        self.key_reload_failures = 0
        self.ttft_s = Histogram(LATENCY_BUCKETS_S)
        self.duration_s = Histogram(LATENCY_BUCKETS_S)
        self.prediction_error_s = Histogram(ERROR_BUCKETS_S)

    def count_connections(self, table: ConnectionCounts) -> None:
        """Take over what the server of the public port has counted."""
        self.connections = len(table.members)
        self.connections_evicted = table.num_evicted
        self.connections_limited = table.num_limited


_SCALARS = {
    "prompt_tokens": "Prompt tokens of answered requests.",
    "cached_prompt_tokens": "Prompt tokens found in a worker's prefix cache.",
    "completion_tokens": "Generated tokens.",
    "cache_hits": "Answers taken from the response cache.",
    "cache_misses": "Response cache lookups that found nothing.",
    "cache_shared": "Requests that joined an identical generation in flight.",
    "connections_evicted": "Waiting connections closed to make room for others.",
    "connections_limited": "Connections beyond the limit, which were served health alone.",
    "disconnects": "Requests whose client left early.",
    "slow_readers": "Clients cut because they did not read.",
    "redis_failures": "Redis calls that failed or came too late.",
    "key_reload_failures": "Times the changed key file could not be read.",
}
_GAUGES = {
    "active_streams": "Requests being answered.",
    "connections": "Open client connections.",
    "is_redis_open": "1: Redis is away.",
}
_BY_REASON = {
    "shed": "Requests refused for lack of capacity.",
    "promises": "Places kept for refused requests, and what became of them.",
    "limited": "Requests refused because a key exceeded a limit.",
    "redispatches": "Sequences sent to another worker.",
    "sequences": "Sequences dispatched, by how they ended.",
}
_HISTOGRAMS = {
    "ttft_s": ("ttft_seconds", "Time to first token."),
    "duration_s": ("request_duration_seconds", "Time to the complete answer."),
    "prediction_error_s": ("ttft_prediction_error_seconds", "Actual minus predicted time to first token."),
}


class MetricsCollector(Collector):
    """Reads a `GatewayMetrics` when Prometheus scrapes."""

    def __init__(self, metrics: GatewayMetrics, process: int) -> None:
        """Label everything with the number of the process among those that share the port."""
        self._metrics = metrics
        self._process = str(process)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        metrics, process = self._metrics, self._process
        requests = CounterMetricFamily("headrace_requests", "Answers.", labels=["process", "route", "status"])
        for (route, status), count in metrics.requests.items():
            requests.add_metric([process, route, str(status)], count)
        yield requests
        for name, text in _BY_REASON.items():
            reasons = CounterMetricFamily(f"headrace_{name}", text, labels=["process", "reason"])
            for reason, count in getattr(metrics, name).items():
                reasons.add_metric([process, reason], count)
            yield reasons
        for name, text in _SCALARS.items():
            scalar = CounterMetricFamily(f"headrace_{name}", text, labels=["process"])
            scalar.add_metric([process], getattr(metrics, name))
            yield scalar
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"headrace_{name}", text, labels=["process"])
            gauge.add_metric([process], getattr(metrics, name))
            yield gauge
        for attribute, (name, text) in _HISTOGRAMS.items():
            histogram: Histogram = getattr(metrics, attribute)
            family = HistogramMetricFamily(f"headrace_{name}", text, labels=["process"])
            family.add_metric([process], histogram.buckets(), histogram.total)
            yield family


def make_registry(collector: Collector) -> CollectorRegistry:
    """Return a registry of this collector's metrics and nothing else."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry
