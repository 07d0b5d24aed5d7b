"""Rows of metrics as Prometheus sees them."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client.core import Metric

from gateway.telemetry.row import TOKENS_BOUNDS, Kind, MetricRow, Value, add
from shared.histogram import Histogram


def family(kind: Kind, *labels: str) -> Metric:
    name = "headrace_x_total" if kind == "counter" else "headrace_x"
    return MetricRow(name, kind, labels, "What it means.").family()


@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram"])
def test_row_becomes_a_metric_of_its_kind(kind: Kind) -> None:
    metric = family(kind, "model")
    # The client adds `_total` to the name of a counter itself.
    assert (metric.name, metric.type, metric.documentation) == ("headrace_x", kind, "What it means.")
    assert metric.samples == []


@pytest.mark.parametrize(("kind", "name"), [("counter", "headrace_x_total"), ("gauge", "headrace_x")])
def test_number_is_one_sample(kind: Kind, name: str) -> None:
    metric = family(kind, "model", "worker")
    value: Value = 2.5
    add(metric, ["m", "w"], value)
    ((shown, labels, number, *_),) = metric.samples
    assert (shown, labels, number) == (name, {"model": "m", "worker": "w"}, 2.5)


@pytest.mark.parametrize("kind", ["counter", "gauge"])
def test_keys_of_a_counter_are_values_of_the_last_label(kind: Kind) -> None:
    metric = family(kind, "model", "reason")
    add(metric, ["m"], Counter({"a": 1, "b": 2}))
    assert [(s.labels, s.value) for s in metric.samples] == [
        ({"model": "m", "reason": "a"}, 1),
        ({"model": "m", "reason": "b"}, 2),
    ]


@pytest.mark.parametrize("value", [1, Counter({"a": 1}), Histogram((1.0,))])
def test_sample_without_a_value_for_each_label_is_refused(value: Value) -> None:
    metric = family("histogram" if isinstance(value, Histogram) else "gauge", "model", "worker", "reason")
    for labels in (["m"], ["m", "w", "x", "y"]):
        with pytest.raises(AssertionError, match="headrace_x"):
            add(metric, labels, value)


def test_histogram_has_its_buckets_and_its_sum() -> None:
    metric, histogram = family("histogram", "model"), Histogram((1.0, 2.0))
    for value in (0.5, 1.5, 9.0):
        histogram.observe(value)
    add(metric, ["m"], histogram)
    assert [(s.name, s.labels.get("le"), s.value) for s in metric.samples] == [
        ("headrace_x_bucket", "1.0", 1),
        ("headrace_x_bucket", "2.0", 2),
        ("headrace_x_bucket", "+Inf", 3),
        ("headrace_x_count", None, 3),
        ("headrace_x_sum", None, 11.0),
    ]
    assert all(s.labels["model"] == "m" for s in metric.samples)


def test_bounds_of_tokens_grow_by_two_or_more() -> None:
    assert TOKENS_BOUNDS[:6] == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    assert TOKENS_BOUNDS[-1] == 500_000.0
