"""What is counted of models and tenants: times add up, names are bounded."""

from __future__ import annotations

import pytest

from gateway.telemetry.model_metrics import (
    MAX_NAMES,
    OLD_GAP_ROW,
    OTHERS,
    ROWS,
    TENANT_ROWS,
    ModelMetrics,
    RequestMetrics,
)
from gateway.telemetry.row import GAP_BOUNDS_S, LATENCY_BOUNDS_S, TOKENS_BOUNDS, Value, add
from shared.messages import Usage
from shared.receipt import Timing
from shared.worker_metrics import Histogram


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
        metrics.models[f"m{number}"].finished["stop"] += 1
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
    # Of a model that comes when there are four times as many pairs as names, all tenants are one.
    assert len(samples) == 4 * MAX_NAMES + (MAX_NAMES - 4)
    assert sum(sample.value for sample in samples) == MAX_NAMES**2


def sums(metrics: RequestMetrics, process: str) -> dict[tuple[str, ...], float]:
    """Return what each histogram adds up to, by its name and labels."""
    samples = [sample for family in metrics.collect(process) for sample in family.samples]
    return {(s.name.removesuffix("_sum"), *s.labels.values()): s.value for s in samples if s.name.endswith("_sum")}


def test_each_measure_is_shown_under_its_own_name() -> None:
    metrics = RequestMetrics()
    measures = metrics.models["m"]
    names = [name for name in ROWS if name != "finished"]
    for number, name in enumerate(names, 1):
        getattr(measures, name).observe(number / 4)
    expected = {(ROWS[name].name, "7", "m"): number / 4 for number, name in enumerate(names, 1)}
    expected[OLD_GAP_ROW.name, "7", "m"] = expected[ROWS["gap_s"].name, "7", "m"]
    assert sums(metrics, "7") == expected
    rows = (*ROWS.values(), OLD_GAP_ROW, *TENANT_ROWS.values())
    assert [family.documentation for family in metrics.collect("7")] == [row.text for row in rows]


def test_gap_of_several_streams_counts_as_often() -> None:
    metrics = RequestMetrics()
    metrics.models["m"].gap_s.observe(0.25, 3)
    gaps = metrics.models["m"].gap_s
    assert (gaps.count, gaps.total) == (3, 0.75)


def test_lengths_and_ends_of_sequences_are_counted() -> None:
    metrics = ModelMetrics()
    assert metrics.finished == {"stop": 0, "length": 0, "abort": 0, "error": 0}
    metrics.sequence_ended("stop", 5.0, Usage(10, 3), None)
    metrics.sequence_ended("stop", 5.0, Usage(4, 2), Timing(1.0, 0.5))
    metrics.sequence_ended("length", 5.0, None, Timing(1.0, 0.5))
    assert +metrics.finished == {"stop": 2, "length": 1}
    assert (metrics.prompt_lengths.total, metrics.output_lengths.total) == (14, 5)
    assert (metrics.inference_s.count, metrics.mean_gap_s.count) == (2, 1)
    # One gap between two tokens.
    assert metrics.mean_gap_s.total == 0.5


@pytest.mark.parametrize(
    ("names", "bounds"),
    [
        ("ttft_s e2e_s queue_s prefill_s decode_s inference_s", LATENCY_BOUNDS_S),
        ("gap_s mean_gap_s", GAP_BOUNDS_S),
        ("prompt_lengths output_lengths longest_outputs max_tokens", TOKENS_BOUNDS),
        ("choices", (1.0, 2.0, 5.0, 10.0, 20.0)),
    ],
)
def test_measures_of_a_kind_have_the_same_bounds(names: str, bounds: tuple[float, ...]) -> None:
    metrics = ModelMetrics()
    assert [getattr(metrics, name).bounds for name in names.split()] == [bounds] * len(names.split())


def test_what_a_tenant_had_is_counted_by_model_and_process() -> None:
    metrics = RequestMetrics()
    use = metrics.tenant("m", "t")
    use.requests, use.prompt_tokens, use.cached_tokens, use.completion_tokens = 1, 20, 3, 40
    metrics.tenant("m", "u").requests += 5
    assert metrics.tenant("m", "t") is use
    samples = [s for family in metrics.collect("7") for s in family.samples if "tenant" in s.labels]
    values = {(s.name, *s.labels.values()): s.value for s in samples}
    assert {name: values[name, "7", "m", "t"] for name, *_ in values} == {
        "headrace_tenant_requests_total": 1,
        "headrace_tenant_prompt_tokens_total": 20,
        "headrace_tenant_cached_tokens_total": 3,
        "headrace_tenant_completion_tokens_total": 40,
    }
    assert values["headrace_tenant_requests_total", "7", "m", "u"] == 5


def test_model_beyond_the_limit_shares_its_measures_with_all_others() -> None:
    metrics = RequestMetrics()
    first = metrics.models["m"]
    for number in range(1, MAX_NAMES):
        metrics.models[f"m{number}"]
    assert metrics.models["late"] is metrics.models["later"] is metrics.models[OTHERS]
    assert metrics.models["m"] is first


@pytest.mark.parametrize("value", [1.0, Histogram((1.0,))])
def test_sample_without_a_value_for_each_label_is_refused(value: Value) -> None:
    row = ROWS["ttft_s"] if isinstance(value, Histogram) else TENANT_ROWS["requests"]
    for labels in (["m"], ["m", "w", "x", "y"]):
        with pytest.raises(AssertionError, match=row.name.removesuffix("_total")):
            add(row.family(), labels, value)
