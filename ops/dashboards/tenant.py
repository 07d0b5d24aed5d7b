"""Who uses what: requests, tokens, shares and cost by tenant."""

from __future__ import annotations

from ops.dashboards.panel import Dashboard, Panel, Query, Variable, graph, ratio

_MATCH = 'model=~"$model", tenant=~"$tenant"'
_RATE = "[$__rate_interval]"
_TOKENS = (
    f"sum by (tenant) (rate(headrace_tenant_prompt_tokens_total{{{_MATCH}}}{_RATE})) + "
    f"sum by (tenant) (rate(headrace_tenant_completion_tokens_total{{{_MATCH}}}{_RATE}))"
)
_ALL_TOKENS = (
    f"scalar(sum(rate(headrace_tenant_prompt_tokens_total{_RATE})) + "
    f"sum(rate(headrace_tenant_completion_tokens_total{_RATE})))"
)


def _rate(title: str, metric: str, text: str, unit: str = "short") -> Panel:
    query = Query(f"sum by (tenant, model) (rate({metric}{{{_MATCH}}}{_RATE}))", "{{tenant}} {{model}}")
    return graph(title, text, query, unit=unit)


TENANT = Dashboard(
    "tenant",
    "Headrace / Tenants and cost",
    "Requests, tokens and shares by tenant; what a token costs in processor time and energy.",
    (
        Variable("model", "label_values(headrace_tenant_requests_total, model)"),
        Variable("tenant", "label_values(headrace_tenant_requests_total, tenant)"),
    ),
    (
        _rate("Requests", "headrace_tenant_requests_total", "Answered.", "reqps"),
        graph(
            "Share of tokens",
            "Of all prompt and generated tokens.",
            Query(f"({_TOKENS}) / {_ALL_TOKENS}", "{{tenant}}"),
            unit="percentunit",
        ),
        _rate("Prompt tokens per second", "headrace_tenant_prompt_tokens_total", "Of answered requests."),
        _rate("Generated tokens per second", "headrace_tenant_completion_tokens_total", "Of answered requests."),
        ratio(
            "Prompt tokens from the prefix cache",
            "Share that needed no computation.",
            f"sum by (tenant) (rate(headrace_tenant_cached_tokens_total{{{_MATCH}}}{_RATE}))",
            f"sum by (tenant) (rate(headrace_tenant_prompt_tokens_total{{{_MATCH}}}{_RATE}))",
            "{{tenant}}",
        ),
        graph(
            "Refused by limits",
            "429: a key asked for more than its limit of requests, tokens or places.",
            Query(f"sum by (reason) (rate(headrace_limited_total{_RATE}))", "{{reason}}"),
            unit="reqps",
        ),
        graph(
            "Use in the chosen time",
            "Tokens by tenant and model, jobs of the batch lane included.",
            Query(
                f"sum by (tenant, model) (increase(headrace_usage_prompt_tokens_total{{{_MATCH}}}[$__range]))",
                "prompt tokens",
            ),
            Query(
                f"sum by (tenant, model) (increase(headrace_usage_completion_tokens_total{{{_MATCH}}}[$__range]))",
                "generated tokens",
            ),
            kind="table",
        ),
        graph(
            "Processor seconds per 1000 generated tokens",
            "Of all gateways and of all workers: what the system itself costs.",
            Query(
                f"1000 * sum(rate(headrace_process_cpu_seconds_total{_RATE})) / "
                f"sum(rate(vllm:generation_tokens_total{_RATE}))",
                "gateways",
            ),
            Query(
                f"1000 * sum(rate(headrace_worker_process_cpu_seconds_total{_RATE})) / "
                f"sum(rate(vllm:generation_tokens_total{_RATE}))",
                "workers",
            ),
            unit="s",
        ),
    ),
)
