"""What is counted of models and tenants: times add up, names are bounded."""

from __future__ import annotations

from gateway.telemetry.model_metrics import ModelMetrics, RequestMetrics
from gateway.telemetry.row import MAX_NAMES, OTHERS
from shared.messages import Timing, Usage


def test_time_that_its_worker_did_not_compute_is_queue_time() -> None:
    metrics = ModelMetrics()
    metrics.sequence_ended("stop", 5.0, Usage(10, 3), Timing(1.0, 0.5))
    assert (metrics.queue_s.total, metrics.prefill_s.total, metrics.decode_s.total) == (3.5, 1.0, 0.5)
    assert metrics.inference_s.total == 1.5
    assert metrics.mean_gap_s.total == 0.25


def test_clock_that_ran_differently_gives_no_negative_queue_time() -> None:
    metrics = ModelMetrics()
    metrics.sequence_ended("stop", 1.0, Usage(10, 1), Timing(1.0, 0.5))
    assert metrics.queue_s.total == 0
    assert metrics.mean_gap_s.count == 0


def test_sequence_without_an_end_of_its_worker_counts_only_its_reason() -> None:
    metrics = ModelMetrics()
    metrics.sequence_ended("abort", 1.0, None, None)
    assert +metrics.finished == {"abort": 1}
    assert metrics.queue_s.count == metrics.prompt_lengths.count == 0


def test_names_beyond_the_limit_share_one_label() -> None:
    metrics = RequestMetrics()
    for number in range(3 * MAX_NAMES):
        metrics.tenant("m", f"t{number}").requests += 1
        metrics.model(f"m{number}").finished["stop"] += 1
    samples = [sample for family in metrics.collect("0") for sample in family.samples]
    requests = {s.labels["tenant"]: s.value for s in samples if s.name == "headrace_tenant_requests_total"}
    assert len(requests) == MAX_NAMES + 1
    assert requests[OTHERS] == 2 * MAX_NAMES
    models: dict[str, float] = {}
    for sample in samples:
        if sample.name == "vllm:request_success_total":
            name = sample.labels["model_name"]
            models[name] = models.get(name, 0) + sample.value
    assert len(models) == MAX_NAMES
    assert sum(models.values()) == 3 * MAX_NAMES


def test_many_models_of_many_tenants_stay_bounded() -> None:
    metrics = RequestMetrics()
    for model in range(MAX_NAMES):
        for tenant in range(MAX_NAMES):
            metrics.tenant(f"m{model}", f"t{tenant}").requests += 1
    samples = [s for family in metrics.collect("0") for s in family.samples if s.name.endswith("tenant_requests_total")]
    assert len(samples) <= 6 * MAX_NAMES
    assert sum(sample.value for sample in samples) == MAX_NAMES**2
