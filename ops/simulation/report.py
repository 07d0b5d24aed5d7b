"""Results of a simulation, as a table, as JSON, and as a page with plots."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ops.chart import Line, line_chart, page
from ops.simulation.outcome import Outcome, percentile
from ops.simulation.scenario import Scenario
from ops.text_table import aligned

_MOST_POINTS = 240


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a fleet of `devices`; `per_hour` is the price of one."""

    devices: int
    per_hour: float

    def per_million(self, tokens_per_s: float) -> float | None:
        """Return the cost of a million tokens; None where there are none."""
        return self.devices * self.per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s else None


def figures(scenario: Scenario, outcome: Outcome, cost: Cost | None, errors: dict[str, float]) -> dict[str, Any]:
    """Return the figures to print as JSON."""
    result: dict[str, Any] = {
        "workers": scenario.workers,
        "requests": outcome.num_requests,
        "served": outcome.num_served,
        "duration_s": round(outcome.duration_s, 3),
        "requests_per_s": round(outcome.requests_per_s, 3),
        "output_tokens_per_s": round(outcome.output_tokens_per_s, 1),
    }
    times = (
        ("ttft", outcome.ttft_s, outcome.num_served),
        ("itl", outcome.itl_s, outcome.num_output_tokens - outcome.num_served),
        ("answer", outcome.end_s, outcome.num_served),
    )
    for name, values, count in times:
        # No samples: None, since 0 would read as the best possible time.
        result |= {f"{name}_p{of}_ms": round(1e3 * value, 3) if count > 0 else None for of, value in values.items()}
    kv_shares = [moment.kv_share for moment in outcome.moments if moment.at <= outcome.duration_s]
    result |= {
        "refused_share": round(outcome.refused_share, 5),
        "given_up": outcome.num_given_up,
        "served_after_retry": outcome.num_retried,
        "moved": outcome.num_moves,
        "preempted": outcome.num_preemptions,
        "too_long": outcome.num_too_long,
        "unserved": outcome.num_unserved,
        "cached_prompt_share": round(outcome.num_cached_tokens / max(1, outcome.num_prompt_tokens), 4),
        "device_share": round(outcome.device_share, 4),
        "kv_share": round(sum(kv_shares) / max(1, len(kv_shares)), 4),
        "kv_share_max": round(max(kv_shares, default=0.0), 4),
    }
    if cost is not None:
        per_million = cost.per_million(outcome.output_tokens_per_s)
        result |= {
            "devices": cost.devices,
            "cost_per_hour": round(cost.devices * cost.per_hour, 2),
            "cost_per_million_output_tokens": None if per_million is None else round(per_million, 3),
        }
    return result | ({"errors": errors} if errors else {})


def table(scenario: Scenario, outcome: Outcome, cost: Cost | None, errors: dict[str, float]) -> list[str]:
    """Return the same figures as aligned lines of text."""
    found = figures(scenario, outcome, cost, errors)

    def pair(name: str, band: str = "") -> str:
        median, high = found[f"{name}_p50_ms"], found[f"{name}_p99_ms"]
        # Small models take microseconds.
        digits = 1 if median is None or median >= 1 else 3
        return "-" if median is None else f"{median:,.{digits}f} / {high:,.{digits}f} ms{band}"

    def if_served(text: str, otherwise: str = "-") -> str:
        return text if outcome.num_served else otherwise

    lasted = if_served(f" in {outcome.duration_s:,.1f} s", "")
    throughput = f"{outcome.requests_per_s:,.2f} requests/s, {outcome.output_tokens_per_s:,.0f} tokens/s"
    rows = [
        ("requests", f"{outcome.num_served:,} of {outcome.num_requests:,} served{lasted}"),
        ("throughput", if_served(throughput)),
        ("time to first token, p50 / p99", pair("ttft", _band(errors, "ttft_p50", "ttft_p99"))),
        ("between tokens, p50 / p99", pair("itl", _band(errors, "itl_p50", "itl_p99"))),
        ("whole answer, p50 / p99", pair("answer")),
        ("refused attempts", f"{outcome.refused_share:.2%}; {outcome.num_given_up:,} gave up"),
        ("moved from a dead worker", f"{outcome.num_moves:,}"),
        ("preempted", f"{outcome.num_preemptions:,}"),
        ("prompt tokens from the cache", if_served(f"{found['cached_prompt_share']:.1%}")),
        ("devices computing", if_served(f"{outcome.device_share:.1%} of the time, in steps full or not")),
        ("blocks in use, mean / most", if_served(f"{found['kv_share']:.1%} / {found['kv_share_max']:.1%}")),
    ]
    if outcome.num_too_long:
        limit = f"the limit, --max-model-len or the profile's, is {scenario.config.max_num_tokens:,} with the answer"
        rows.append(("prompts that no worker holds", f"{outcome.num_too_long:,}; {limit}"))
    if outcome.num_unserved:
        rows.append(("never served", f"{outcome.num_unserved:,} waited for ever: all workers of their cell are dead"))
    if cost is not None:
        per_million = found["cost_per_million_output_tokens"]
        shown = "-" if per_million is None else f"{per_million:,.2f} a million output tokens"
        rows.append(("cost", f"{shown}; {found['cost_per_hour']:,.2f} an hour for {cost.devices} devices"))
    return aligned(rows)


def html(title: str, scenario: Scenario, outcome: Outcome, cost: Cost | None, errors: dict[str, float]) -> str:
    """Return a page with the table and plots, which needs nothing from elsewhere."""
    moments = outcome.moments[:: max(1, len(outcome.moments) // _MOST_POINTS)]
    times = [moment.at for moment in moments]
    ttfts = sorted(outcome.ttfts_s)
    shares = list(range(1, 100)) if ttfts else []
    milliseconds = Line("milliseconds", shares, [1e3 * percentile(ttfts, share) for share in shares])

    def per_second(name: str, total: str) -> Line:
        pairs = list(pairwise(moments))
        rates = [(getattr(later, total) - getattr(first, total)) / (later.at - first.at) for first, later in pairs]
        return Line(name, [later.at for _, later in pairs], rates)

    def at_once(name: str, attribute: str) -> Line:
        return Line(name, times, [getattr(moment, attribute) for moment in moments])

    charts = [
        line_chart("Requests", "seconds", [at_once("running", "running"), at_once("waiting", "waiting")]),
        line_chart("Tokens a second", "seconds", [per_second("generated", "num_tokens")]),
        line_chart("Refused attempts a second", "seconds", [per_second("refused", "num_refusals")]),
        line_chart("Share of blocks in use", "seconds", [at_once("blocks", "kv_share")]),
        line_chart("Time to first token, by percentile", "percentile", [milliseconds]),
    ]
    return page(title, table(scenario, outcome, cost, errors), charts)


def _band(errors: dict[str, float], *names: str) -> str:
    """Return by how much predictions erred on other loads, where that is known."""
    shown = [f"{errors[name]:.0%}" for name in names if name in errors]
    return f"  (± {' / '.join(shown)} on loads it was not fitted to)" if len(shown) == len(names) else ""
