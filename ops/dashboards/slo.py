"""The objectives: the share of promises kept, and how fast the error budget is used up.

Ratios come from the recording rules in `ops/alerts/headrace.rules.yml`, which also set the objectives.
"""

from __future__ import annotations

from dataclasses import replace

from ops.dashboards.panel import Dashboard, Panel, Query, Variable, graph, latencies, quantiles

OBJECTIVE = 0.99
_MATCH = 'model_name=~"$model"'


def _burn(title: str, record: str) -> Panel:
    queries = tuple(
        Query(
            f"(1 - headrace:{record}:ratio_rate{window}{{{_MATCH}}}) / {1 - OBJECTIVE:.2f}",
            f"{{{{model_name}}}} {window}",
        )
        for window in ("5m", "30m", "1h", "6h")
    )
    text = "1 uses up the budget of 1 % in 30 days exactly; 14.4 in two days, which pages."
    return Panel(title, text, queries, limit=14.4)


def _kept(title: str, record: str, promise: str) -> Panel:
    query = Query(f"headrace:{record}:ratio_rate6h{{{_MATCH}}}", "{{model_name}}")
    return graph(
        title,
        f"{promise} Over six hours; the objective is 99 %.",
        query,
        unit="percentunit",
        kind="stat",
        width=8,
        objective=OBJECTIVE,
        empty="no requests yet",
    )


SLO = Dashboard(
    "slo",
    "Headrace / Objectives",
    "Time to first token within 2.5 s and time between tokens within 0.1 s, each for 99 % of requests and tokens.",
    (Variable("model", "label_values(vllm:time_to_first_token_seconds_count, model_name)"),),
    (
        _kept("First token within 2.5 s", "ttft_good", "Share of requests."),
        _kept("Next token within 0.1 s", "itl_good", "Share of gaps between tokens."),
        graph(
            "Promises kept",
            "Share of clients admitted when they retried at the promised time. Over six hours.",
            Query(
                'sum(increase(headrace_promises_total{reason="kept"}[6h])) / '
                '(sum(increase(headrace_promises_total{reason=~"kept|broken"}[6h])) > 0)'
            ),
            unit="percentunit",
            kind="stat",
            width=8,
            objective=OBJECTIVE,
            empty="no refused client has come back",
        ),
        _burn("Burn of the budget: first token", "ttft_good"),
        _burn("Burn of the budget: time between tokens", "itl_good"),
        *latencies(_MATCH, 2.5, 0.1),
        Panel(
            "Error of predictions",
            "Actual minus predicted time to first token; predictions decide who is admitted.",
            quantiles("headrace_ttft_prediction_error_seconds", "", "", (0.05, 0.95)),
            unit="s",
        ),
        Panel(
            "Error of Retry-After",
            "By how much longer than told clients had to wait for their place.",
            # A quantile of nothing is not a number, which no comparison lets through.
            tuple(
                replace(query, expression=f"{query.expression} >= 0")
                for query in quantiles("headrace_retry_after_error_seconds", "", "", (0.95,))
            ),
            unit="s",
            empty="no refused client has come back",
        ),
    ),
)
