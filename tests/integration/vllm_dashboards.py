"""What vLLM's public dashboards ask Prometheus for, written down as data: metric, kind of query, labels.

From the repository vllm-project/vllm: `prometheus_grafana/grafana.json` (dashboard "vLLM", its 19 distinct queries) and
`dashboards/perses/query_statistics.yaml`, both as of early 2026 under `examples/online_serving`. Label values that a
dashboard takes from its own variables, and labels that Prometheus adds to a target, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    """A time series that a panel needs: a sample's name, the labels it is filtered and grouped by."""

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
