"""Metrics as Prometheus reads them."""

from __future__ import annotations

import re

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayMetrics, Histogram, MetricsCollector, make_registry


def scrape(metrics: GatewayMetrics) -> dict[tuple[str, str], float]:
    text = generate_latest(make_registry(MetricsCollector(metrics, 3))).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels["process"] == "3" for sample in samples)
    return {(s.name, ",".join(v for k, v in sorted(s.labels.items()) if k != "process")): s.value for s in samples}


def test_every_attribute_is_exported() -> None:
    metrics = GatewayMetrics()
    metrics.requests[("chat", 200)] += 2
    for name in ("shed", "promises", "limited", "redispatches", "sequences"):
        getattr(metrics, name)["why"] += 1
    for name in GatewayMetrics.__slots__:
        if isinstance(getattr(metrics, name), int) and not isinstance(getattr(metrics, name), bool):
            setattr(metrics, name, 7)
    metrics.is_redis_open = True
    for name in GatewayMetrics.__slots__:
        if isinstance(getattr(metrics, name), Histogram):
            getattr(metrics, name).observe(0.02)
    values = scrape(metrics)
    assert values["headrace_requests_total", "chat,200"] == 2
    assert values["headrace_shed_total", "why"] == 1
    assert values["headrace_is_redis_open", ""] == 1
    assert values["headrace_active_streams", ""] == 7
    assert values["headrace_completion_tokens_total", ""] == 7
    assert values["headrace_ttft_seconds_sum", ""] == 0.02
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name, _ in values}
    assert len(families) == len(GatewayMetrics.__slots__)


def test_histogram_counts_into_the_first_bucket_that_holds_the_value() -> None:
    histogram = Histogram((-1.0, 0.0, 1.0))
    for value in (-2.0, -1.0, 0.5, 1.0, 5.0):
        histogram.observe(value)
    assert histogram.buckets() == [("-1.0", 2), ("0.0", 2), ("1.0", 4), ("+Inf", 5)]
    assert histogram.total == 3.5


def test_two_gateways_in_one_process_do_not_share_numbers() -> None:
    first, second = GatewayMetrics(), GatewayMetrics()
    first.prompt_tokens += 1
    assert scrape(second)["headrace_prompt_tokens_total", ""] == 0


def test_no_metric_names_a_tenant_or_a_key() -> None:
    metrics = GatewayMetrics()
    metrics.requests[("chat", 200)] += 1
    for name in ("shed", "promises", "limited", "redispatches", "sequences"):
        getattr(metrics, name)["why"] += 1
    families = MetricsCollector(metrics, 0).collect()
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert labels <= {"process", "route", "status", "reason", "le"}
