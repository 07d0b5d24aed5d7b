"""A row of the tables that say which metrics there are: name, kind, labels, meaning; and samples made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from shared.worker_metrics import Histogram

Kind = Literal["counter", "gauge", "histogram"]
Value = float | Histogram | Counter[str]

LATENCY_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
GAP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
TOKENS_BOUNDS = (1.0, 2.0, 5.0, *(scale * 10.0**power for power in range(1, 6) for scale in (1.0, 2.0, 5.0)))


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric.

    Attributes:
        name: As a query writes it: with `_total` for a counter, without `_bucket` for a histogram.
        labels: Their names, in the order in which samples give their values.
        text: What it means.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str

    def family(self) -> Metric:
        """Return the metric without samples."""
        if self.kind == "counter":
            return CounterMetricFamily(self.name, self.text, labels=self.labels)
        if self.kind == "gauge":
            return GaugeMetricFamily(self.name, self.text, labels=self.labels)
        return HistogramMetricFamily(self.name, self.text, labels=self.labels)


def add(family: Metric, labels: Sequence[str], value: Value) -> None:
    """Add counts to a metric; the keys of a `Counter` are the values of its last label."""
    assert isinstance(family, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily)
    # The client would leave out a label without a value, and so add up samples that are not the same.
    assert len(labels) + isinstance(value, Counter) == len(family._labelnames), family.name
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Histogram)
        family.add_metric(labels, value.buckets(), value.total)
        return
    assert not isinstance(value, Histogram)
    if isinstance(value, Counter):
        for key, count in value.items():
            family.add_metric([*labels, key], count)
    else:
        family.add_metric(labels, value)
