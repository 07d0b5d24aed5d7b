"""What a gateway process measures of each model's requests, and of each tenant's: under vLLM's names where it has them.

A request of HTTP may be several sequences (`n`, lists of prompts). Latencies and parameters are those of requests, as a
client sees them, answers from the response cache included; reasons to finish, lengths and phases are of sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client.core import Metric

from gateway.telemetry.row import GAP_BOUNDS_S, LATENCY_BOUNDS_S, TOKENS_BOUNDS, MetricRow, add
from shared.messages import Usage
from shared.receipt import Timing
from shared.worker_metrics import Histogram

# Names of models and tenants that one process tells apart; more share one label, so that a scrape stays small.
MAX_NAMES = 64
OTHERS = "other"

_MODEL = ("process", "model_name")
_TENANT = ("process", "model", "tenant")

_SECONDS = {
    "ttft_s": ("time_to_first_token", "From the complete request to its first token."),
    "e2e_s": ("e2e_request_latency", "From the complete request to the end of its answer."),
    "gap_s": ("inter_token_latency", "Between two deltas of a stream, as the gateway receives them."),
    "mean_gap_s": ("request_time_per_output_token", "Mean time per token of a sequence, after its first."),
    "queue_s": ("request_queue_time", "Of a sequence outside the worker's steps: queue, transport, waiting there."),
    "prefill_s": ("request_prefill_time", "Of a sequence from its first step to its first output."),
    "decode_s": ("request_decode_time", "Of a sequence from its first output to its end."),
    "inference_s": ("request_inference_time", "Of a sequence from its first step to its end."),
}
_TOKENS = {
    "prompt_lengths": ("request_prompt_tokens", "Prompt tokens of each sequence."),
    "output_lengths": ("request_generation_tokens", "Generated tokens of each sequence."),
    "longest_outputs": ("request_max_num_generation_tokens", "Generated tokens of the longest choice of each request."),
    "max_tokens": ("request_params_max_tokens", "`max_tokens` of the requests that have it."),
    "choices": ("request_params_n", "`n` of each request."),
}
ROWS: Mapping[str, MetricRow] = MappingProxyType(
    {
        **{key: MetricRow(f"vllm:{name}_seconds", "histogram", _MODEL, text) for key, (name, text) in _SECONDS.items()},
        **{key: MetricRow(f"vllm:{name}", "histogram", _MODEL, text) for key, (name, text) in _TOKENS.items()},
        "finished": MetricRow(
            "vllm:request_success_total",
            "counter",
            (*_MODEL, "finished_reason"),
            "Sequences by how they ended: `stop`, `length`, `abort` (the client left, or did not want more), `error`.",
        ),
    }
)
# The name before vLLM 0.12, which many dashboards still ask for.
OLD_GAP_ROW = MetricRow(
    "vllm:time_per_output_token_seconds", "histogram", _MODEL, "The same as `vllm:inter_token_latency_seconds`."
)
TENANT_ROWS: Mapping[str, MetricRow] = MappingProxyType(
    {
        "requests": MetricRow("headrace_tenant_requests_total", "counter", _TENANT, "Answered requests of a tenant."),
        "prompt_tokens": MetricRow("headrace_tenant_prompt_tokens_total", "counter", _TENANT, "Their prompt tokens."),
        "cached_tokens": MetricRow(
            "headrace_tenant_cached_tokens_total", "counter", _TENANT, "Those found in a worker's prefix cache."
        ),
        "completion_tokens": MetricRow(
            "headrace_tenant_completion_tokens_total", "counter", _TENANT, "Their generated tokens."
        ),
    }
)


class BoundedNames:
    """Names that become label values: the first ones that come; all others are one."""

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        """Return the label value for a name."""
        if name in self._known:
            return name
        if len(self._known) >= self._limit:
            return OTHERS
        self._known.add(name)
        return name


class ModelMetrics:
    """Measures of one model. The attributes are the keys of `ROWS`; see there."""

    def __init__(self) -> None:
        self.ttft_s, self.e2e_s = Histogram(LATENCY_BOUNDS_S), Histogram(LATENCY_BOUNDS_S)
        self.gap_s, self.mean_gap_s = Histogram(GAP_BOUNDS_S), Histogram(GAP_BOUNDS_S)
        self.queue_s, self.prefill_s = Histogram(LATENCY_BOUNDS_S), Histogram(LATENCY_BOUNDS_S)
        self.decode_s, self.inference_s = Histogram(LATENCY_BOUNDS_S), Histogram(LATENCY_BOUNDS_S)
        self.prompt_lengths, self.output_lengths = Histogram(TOKENS_BOUNDS), Histogram(TOKENS_BOUNDS)
        self.longest_outputs, self.max_tokens = Histogram(TOKENS_BOUNDS), Histogram(TOKENS_BOUNDS)
        self.choices = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.finished = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))

    def sequence_ended(self, reason: str, total_s: float, usage: Usage | None, timing: Timing | None) -> None:
        """Count a sequence that was dispatched `total_s` ago; its worker may have told usage and timing."""
        self.finished[reason] += 1
        if usage is not None:
            self.prompt_lengths.observe(usage.prompt_tokens)
            self.output_lengths.observe(usage.completion_tokens)
        if timing is None:
            return
        inference_s = timing.prefill_s + timing.decode_s
        self.prefill_s.observe(timing.prefill_s)
        self.decode_s.observe(timing.decode_s)
        self.inference_s.observe(inference_s)
        self.queue_s.observe(max(0.0, total_s - inference_s))
        if usage is not None and usage.completion_tokens > 1:
            self.mean_gap_s.observe(timing.decode_s / (usage.completion_tokens - 1))


@dataclass(slots=True)
class TenantUse:
    """What one tenant had of one model. The attributes are the keys of `TENANT_ROWS`."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class ModelTable(dict[str, ModelMetrics]):
    """The measures of each model, made when first read; models beyond `MAX_NAMES` share one entry."""

    def __init__(self) -> None:
        self.names = BoundedNames()

    def __missing__(self, name: str) -> ModelMetrics:
        """Return the measures of a model that has none yet."""
        return self.setdefault(self.names.label(name), ModelMetrics())


class RequestMetrics:
    """The measures of all models and tenants of one process."""

    def __init__(self) -> None:
        self.models = ModelTable()
        self._tenant_names = BoundedNames()
        self._tenants: dict[tuple[str, str], TenantUse] = {}

    def tenant(self, model: str, tenant: str) -> TenantUse:
        """Return what a tenant had of a model."""
        found = self._tenants.get((model, tenant))
        if found is None:
            key = (self.models.names.label(model), self._tenant_names.label(tenant))
            if key not in self._tenants and len(self._tenants) >= MAX_NAMES * 4:
                key = (key[0], OTHERS)
            found = self._tenants.setdefault(key, TenantUse())
        return found

    def collect(self, process: str) -> Iterator[Metric]:
        """Yield every metric, with its samples in the name of a process."""
        models = list(self.models.items())
        for attribute, row in (*ROWS.items(), ("gap_s", OLD_GAP_ROW)):
            family = row.family()
            for name, measures in models:
                add(family, [process, name], getattr(measures, attribute))
            yield family
        for attribute, row in TENANT_ROWS.items():
            family = row.family()
            for labels, use in list(self._tenants.items()):
                add(family, [process, *labels], getattr(use, attribute))
            yield family
