"""Metrics as Prometheus reads them."""

from __future__ import annotations

import re
from typing import get_args

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.dispatch.dispatcher import Ending
from gateway.metrics import REASONS, GatewayMetrics, MetricsCollector, MoveReason, make_registry
from shared.dead_letters import DeadReason
from shared.worker_metrics import Histogram


def scrape(metrics: GatewayMetrics) -> dict[tuple[str, str], float]:
    text = generate_latest(make_registry(MetricsCollector(metrics, 3))).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels["process"] == "3" for sample in samples)
    return {(s.name, ",".join(v for k, v in sorted(s.labels.items()) if k != "process")): s.value for s in samples}


def test_every_attribute_is_exported() -> None:
    metrics = GatewayMetrics()
    metrics.requests[("chat", 200)] += 2
    for name in ("shed", "promises", "limited", "redispatches", "sequences", "dead_letters", "canary_rollbacks"):
        getattr(metrics, name)["why"] += 1
    metrics.canary_requests["chat", "", "canary", "failed"] += 3
    for name in vars(GatewayMetrics()):
        if isinstance(getattr(metrics, name), int) and not isinstance(getattr(metrics, name), bool):
            setattr(metrics, name, 7)
    metrics.is_redis_open = True
    for name in vars(GatewayMetrics()):
        if isinstance(getattr(metrics, name), Histogram):
            getattr(metrics, name).observe(0.02)
    metrics.by_model.models["m"].ttft_s.observe(0.02)
    values = scrape(metrics)
    assert values["headrace_requests_total", "chat,200"] == 2
    assert values["headrace_shed_total", "why"] == 1
    assert values["headrace_canary_requests_total", "chat,canary,failed,"] == 3
    assert values["headrace_canary_rollbacks_total", "why"] == 1
    assert values["headrace_is_redis_open", ""] == 1
    assert values["headrace_active_streams", ""] == 7
    assert values["headrace_completion_tokens_total", ""] == 7
    assert values["headrace_retry_after_error_seconds_sum", ""] == 0.02
    assert values["vllm:time_to_first_token_seconds_sum", "m"] == 0.02
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name, _ in values if name.startswith("headrace_")}
    # `by_model` is another table, NATS adds up `usage` and `answers`; processor time and memory are read on demand.
    assert len(families) == len(vars(GatewayMetrics())) - 3 + 2


def test_two_gateways_in_one_process_do_not_share_numbers() -> None:
    first, second = GatewayMetrics(), GatewayMetrics()
    first.prompt_tokens += 1
    assert scrape(second)["headrace_prompt_tokens_total", ""] == 0


def test_no_metric_names_a_key_and_only_those_of_tenants_name_a_tenant() -> None:
    metrics = GatewayMetrics()
    metrics.requests[("chat", 200)] += 1
    for name in ("shed", "promises", "limited", "redispatches", "sequences", "dead_letters"):
        getattr(metrics, name)["why"] += 1
    metrics.by_model.models["m"].finished["stop"] += 1
    metrics.by_model.tenant("m", "t").requests += 1
    samples = [sample for family in MetricsCollector(metrics, 0).collect() for sample in family.samples]
    labels = {label for sample in samples for label in sample.labels}
    allowed = {"process", "route", "status", "reason", "le", "model", "model_name", "finished_reason", "tenant"}
    assert labels == allowed
    assert all(s.name.startswith("headrace_tenant_") for s in samples if "tenant" in s.labels)


def test_every_reason_is_there_before_it_happens_and_is_one_that_the_code_has() -> None:
    values = scrape(GatewayMetrics())
    assert {reason: values["headrace_redispatches_total", reason] for reason in get_args(MoveReason)} == dict.fromkeys(
        get_args(MoveReason), 0
    )
    assert set(REASONS["redispatches"]) == set(get_args(MoveReason))
    assert set(REASONS["sequences"]) == set(get_args(Ending))
    assert set(REASONS["dead_letters"]) == set(get_args(DeadReason))
    assert values["headrace_shed_total", "no_worker"] == 0
