"""What Prometheus is told by the running system, after a few requests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.process.metrics_page import EVERY_ROW
from tests.integration.system import System, running_system
from tests.waiting import wait_for


@dataclass(frozen=True)
class Query:
    """A time series that a panel of vLLM's public dashboards needs: a sample's name, the labels that it is filtered by.

    From vllm-project/vllm, early 2026, `examples/online_serving`: `prometheus_grafana/grafana.json` (dashboard "vLLM")
    and `dashboards/perses/query_statistics.yaml`. Label values that a dashboard takes from its own variables, and
    labels that Prometheus adds to a target, are left out.
    """

    panel: str
    sample: str
    labels: tuple[str, ...] = ("model_name",)


def _quantiles(panel: str, name: str) -> list[Query]:
    return [
        Query(panel, f"{name}_bucket", ("model_name", "le")),
        Query(panel, f"{name}_sum"),
        Query(panel, f"{name}_count"),
    ]


MAIN = [
    *_quantiles("E2E Request Latency", "vllm:e2e_request_latency_seconds"),
    Query("Token Throughput", "vllm:prompt_tokens_total"),
    Query("Token Throughput", "vllm:generation_tokens_total"),
    *_quantiles("Time Per Output Token Latency", "vllm:time_per_output_token_seconds"),
    *_quantiles("Time Per Output Token Latency (new name)", "vllm:inter_token_latency_seconds"),
    Query("Scheduler State", "vllm:num_requests_running"),
    Query("Scheduler State", "vllm:num_requests_waiting"),
    *_quantiles("Time To First Token Latency", "vllm:time_to_first_token_seconds"),
    Query("Cache Utilization", "vllm:gpu_cache_usage_perc"),
    Query("Cache Utilization (new name)", "vllm:kv_cache_usage_perc"),
    Query("Request Prompt Length", "vllm:request_prompt_tokens_bucket", ("model_name", "le")),
    Query("Request Generation Length", "vllm:request_generation_tokens_bucket", ("model_name", "le")),
    Query("Finish Reason", "vllm:request_success_total", ("model_name", "finished_reason")),
    Query("Queue Time", "vllm:request_queue_time_seconds_sum"),
    Query("Requests Prefill and Decode Time", "vllm:request_prefill_time_seconds_sum"),
    Query("Requests Prefill and Decode Time", "vllm:request_decode_time_seconds_sum"),
    Query("Max Generation Token in Sequence Group", "vllm:request_max_num_generation_tokens_sum"),
]
STATISTICS = [
    Query("Running Requests (now)", "vllm:num_requests_running", ()),
    Query("Waiting Requests (now)", "vllm:num_requests_waiting", ()),
    Query("KV Cache Usage (0-1)", "vllm:kv_cache_usage_perc", ()),
    Query("Request Rate", "vllm:request_success_total"),
    Query("p50 Latency", "vllm:e2e_request_latency_seconds_bucket", ("model_name", "le")),
    Query("Input Tokens / sec", "vllm:prompt_tokens_total"),
    Query("Output Tokens / sec", "vllm:generation_tokens_total"),
]
EVERY_QUERY = [*MAIN, *STATISTICS]
# They may be 0 in a system at rest; all others have counted something after a request.
GAUGES = frozenset(
    {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"}
)


def _scrape(system: System) -> list[Metric]:
    return list(text_string_to_metric_families(system.metrics()))


def _value(families: list[Metric], name: str) -> float:
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


class Scrapes:
    """Metrics before and after some requests; other tests use the same system."""

    def __init__(self, system: System) -> None:
        client, model = system.client(), system.model
        self.before = _settled(system)
        for stream in (True, False):
            answer = client.completions.create(model=model, prompt="a b c", max_tokens=5, stream=stream, n=2)
            if stream:
                list(answer)
        generated = "vllm:generation_tokens_total"
        wait_for(lambda: _value(_scrape(system), generated) >= _value(self.before, generated) + 20, 60)
        self.after = _settled(system)

    def more(self, name: str) -> float:
        return _value(self.after, name) - _value(self.before, name)


def _settled(system: System) -> list[Metric]:
    """Return the metrics once the heartbeats, which tell of a worker's counts every half second, tell nothing new."""
    deadline, last, since = time.monotonic() + 15, -1.0, time.monotonic()
    while True:
        families = _scrape(system)
        generated = _value(families, "vllm:generation_tokens_total")
        if generated != last:
            last, since = generated, time.monotonic()
        if (generated and time.monotonic() - since > 1.2) or time.monotonic() > deadline:
            return families
        time.sleep(0.1)


@pytest.fixture(scope="module")
def scrapes(simulated: System) -> Scrapes:
    return Scrapes(simulated)


@pytest.fixture
def scraped(scrapes: Scrapes) -> list[Metric]:
    return scrapes.after


@pytest.mark.parametrize("query", EVERY_QUERY, ids=lambda query: f"{query.panel}-{query.sample}")
def test_panel_of_vllms_dashboards_has_data(scraped: list[Metric], simulated: System, query: Query) -> None:
    samples = [sample for family in scraped for sample in family.samples if sample.name == query.sample]
    found = [sample for sample in samples if set(query.labels) <= sample.labels.keys()]
    assert found
    if "model_name" in query.labels:
        assert {sample.labels["model_name"] for sample in found} >= {simulated.model}
    assert query.sample in GAUGES or any(sample.value > 0 for sample in found)


def test_every_metric_is_one_that_the_reference_names_and_the_other_way_round(scraped: list[Metric]) -> None:
    expected = {row.name.removesuffix("_total"): row for row in EVERY_ROW}
    assert {family.name.removesuffix("_total") for family in scraped} == expected.keys()
    for family in scraped:
        row = expected[family.name.removesuffix("_total")]
        assert family.type == row.kind, family.name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(row.labels), sample


def test_tokens_of_worker_gateway_and_tenant_agree(scrapes: Scrapes) -> None:
    assert scrapes.more("vllm:generation_tokens_total") == 20
    assert scrapes.more("vllm:request_generation_tokens_sum") == 20
    assert scrapes.more("headrace_tenant_completion_tokens_total") == 20
    assert scrapes.more("vllm:request_success_total") == 4
    assert scrapes.more("vllm:request_params_n_sum") == 4
    # Each of four sequences has four gaps, one between every two of its five tokens.
    assert scrapes.more("vllm:inter_token_latency_seconds_count") == 16


def test_phases_of_requests_are_parts_of_their_latency(scrapes: Scrapes) -> None:
    phases = ("queue", "prefill", "decode")
    queue_s, prefill_s, decode_s = (scrapes.more(f"vllm:request_{phase}_time_seconds_sum") for phase in phases)
    inference_s = scrapes.more("vllm:request_inference_time_seconds_sum")
    assert prefill_s + decode_s == pytest.approx(inference_s)
    # Four sequences, four steps of 5 ms each after the first token, by a clock that counts whole milliseconds.
    assert decode_s >= 4 * 4 * 0.004
    # Two sequences share a request, so its time counts twice; the gateway's clock is exact to a millisecond.
    assert queue_s + inference_s <= 2 * scrapes.more("vllm:e2e_request_latency_seconds_sum") + 0.01


def test_name_of_a_model_that_a_client_made_up_becomes_no_label(scrapes: Scrapes, simulated: System) -> None:
    with pytest.raises(openai.NotFoundError):
        simulated.client().completions.create(model="made-up", prompt="x", max_tokens=1, temperature=0)
    assert "made-up" not in simulated.metrics()


@pytest.mark.slow
def test_one_scrape_of_several_processes_shows_each_request_and_the_fleet_once(tmp_path: Path) -> None:
    with running_system(tmp_path, "--simulate", "5", "--gateways", "2", "--workers", "2") as system:
        model = system.model
        for _ in range(12):
            # A connection each, so that both processes get some.
            with httpx2.Client(base_url=system.url, headers=system.headers()) as client:
                body = {"model": model, "prompt": "x", "max_tokens": 3, "temperature": 1.0}
                assert client.post("/v1/completions", json=body).status_code == 200
        # Processes tell each other once a second.
        time.sleep(2.5)
        for _ in range(6):
            samples = [sample for family in _scrape(system) for sample in family.samples]
            keys = [(sample.name, *sorted(sample.labels.items())) for sample in samples]
            assert len(set(keys)) == len(keys)
            answered = [
                s.value for s in samples if s.name == "headrace_requests_total" and s.labels["route"] == "completion"
            ]
            # `headrace up` has asked once itself.
            assert sum(answered) == 13
            assert {s.labels["process"] for s in samples if s.name == "headrace_active_streams"} == {"0", "1"}
            assert len([s for s in samples if s.name == "vllm:num_requests_running"]) == 2
            assert [s.value for s in samples if s.name == "headrace_fleet_gateways"] == [2]
