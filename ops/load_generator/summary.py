"""The figures of a run, as a dictionary, as a table, and as a page with plots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ops.chart import Line, bar_chart, line_chart, page
from ops.load_generator.record import Record, Report
from ops.simulation.outcome import percentile
from ops.text_table import aligned

_PERCENTS = (50, 90, 99)
_POINTS = 200
_SLICES = 60
_KINDS = {"ttft": "Time to first token", "itl": "Between pieces of text", "tpot": "Per token after the first"}


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """Return the seconds of all answers that ended well, by their kind."""
    good = [record for record in records if record.problem is None]
    return {
        "ttft": [record.ttft_s for record in good if record.ttft_s is not None],
        "itl": [gap for record in good for gap in record.gaps_s],
        "tpot": [tpot for record in good if (tpot := record.tpot_s) is not None],
        "e2el": [record.latency_s for record in good],
    }


def summarize(records: Sequence[Record], duration_s: float, slo_ms: dict[str, float]) -> dict[str, Any]:
    """Return the figures of a run."""
    good = [record for record in records if record.problem is None]
    refused = [record for record in records if record.is_refused]
    told = [record.retry_after_s for record in refused if record.retry_after_s is not None]
    seconds = duration_s or 1.0
    result: dict[str, Any] = {
        "completed": len(good),
        "refused": len(refused),
        "failed": len(records) - len(good) - len(refused),
        "problems": dict(Counter(record.problem for record in records if record.problem is not None).most_common()),
        "retry_after_s": [min(told), max(told)] if told else None,
        "without_retry_after": len(refused) - len(told),
        "without_usage": sum(not record.has_usage for record in good),
        "duration_s": round(duration_s, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens": sum(record.output_tokens for record in good),
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in good),
        "cached_tokens": sum(record.cached_tokens or 0 for record in good),
        "output_tokens_per_s": round(sum(record.output_tokens for record in good) / seconds, 2),
        "sent_late_p99_ms": round(1e3 * percentile([r.sent_s - r.intended_s for r in records], 99), 3),
    }
    if slo_ms:
        met = sum(record.meets(slo_ms) for record in records)
        result |= {"goodput_per_s": round(met / seconds, 3), "goodput_share": round(met / max(1, len(records)), 4)}
    for kind, values in latencies(records).items():
        result[f"{kind}_mean_ms"] = round(1e3 * sum(values) / len(values), 3) if values else None
        for percent in _PERCENTS:
            result[f"{kind}_p{percent}_ms"] = round(1e3 * percentile(values, percent), 3) if values else None
    return result


def table(report: Report) -> list[str]:
    """Return the figures for people."""
    found = report.summary
    total = len(report.requests)
    cached = f" ({found['cached_tokens']:,} of them cached)" if found["cached_tokens"] else ""
    rows = [
        ["completed", f"{found['completed']:,} of {total + report.num_unfinished:,} in {found['duration_s']:,.1f} s"],
        ["refused (429, 503)", f"{found['refused']:,}{_retry_after(found)}"],
        ["failed", f"{found['failed']:,}"],
        *([["not ended", f"{report.num_unfinished:,}"]] if report.num_unfinished else []),
        ["throughput", f"{found['requests_per_s']:,.2f} requests/s, {found['output_tokens_per_s']:,.1f} tokens/s"],
        ["tokens", f"{found['output_tokens']:,} out, {found['prompt_tokens']:,} in{cached}"],
    ]
    if report.goodput_ms:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in report.goodput_ms.items())
        share = f"{found['goodput_share']:.1%} of requests"
        rows.append(["goodput", f"{found['goodput_per_s']:,.2f} requests/s, {share} ({limits} ms)"])
    names = ["mean", *(f"p{percent}" for percent in _PERCENTS)]
    times, measured = [["ms", *names]], latencies(report.requests)
    for kind, title in (_KINDS | {"e2el": "Whole answer"}).items():
        # A percentile of fewer values is the largest of them under another name.
        is_told = [True, *(len(measured[kind]) * min(percent, 100 - percent) >= 100 for percent in _PERCENTS)]
        values = [found[f"{kind}_{name}_ms"] if told else None for name, told in zip(names, is_told, strict=True)]
        times.append([title, *("-" if value is None else f"{value:,.2f}" for value in values)])
    return [*aligned(rows), "", *aligned(times), "", *_notes(report)]


def _retry_after(found: dict[str, Any]) -> str:
    if not found["refused"]:
        return ""
    told = found["retry_after_s"]
    words = "" if told is None else f"; Retry-After {told[0]} to {told[1]} s"
    return f"{words}; {found['without_retry_after']} without" if found["without_retry_after"] else words


def _notes(report: Report) -> Iterator[str]:
    found = report.summary
    if report.is_closed_loop:
        yield "Latencies count from the sending: without --request-rate requests have no time at which they are due."
    else:
        late = found["sent_late_p99_ms"]
        yield f"Latencies count from the time at which a request was due; sent later than that by {late:g} ms at p99."
    if found["refused"] and report.is_closed_loop and "max_concurrency" not in report.load:
        yield "All requests were sent at once; --max-concurrency or --request-rate sends as many as can be served."
    if found["without_usage"]:
        yield f"{found['without_usage']} answers told no usage: their tokens are counted by pieces of text."
    for problem, count in list(found["problems"].items())[:8]:
        yield f"{count} x {re.sub(r'[^ -~]', '?', problem)}"


def as_page(report: Report) -> str:
    """Return a page with the table and plots."""
    times = latencies(report.requests)
    charts = [
        _over_time("Output tokens per second", report, _token_times(report)),
        line_chart("Requests under way", "s", [_under_way(report)]),
        line_chart(f"{_KINDS['ttft']}: ms at each percentile", "percentile", [_curve("TTFT", times["ttft"])]),
        line_chart(
            "Between tokens: ms at each percentile",
            "percentile",
            [_curve("gaps (ITL)", times["itl"]), _curve("mean of a request (TPOT)", times["tpot"])],
        ),
    ]
    if problems := report.summary["problems"]:
        charts.append(bar_chart("Problems", [(name[:24], float(count)) for name, count in list(problems.items())[:8]]))
    return page(f"{report.model} at {report.url}, {report.started}", table(report), charts)


def _token_times(report: Report) -> Iterator[tuple[float, float]]:
    """Yield when each piece of text was there, and its tokens: pieces of an answer count alike."""
    for record in report.requests:
        if record.ttft_s is None:
            continue
        at, tokens = record.intended_s + record.ttft_s, record.output_tokens / (1 + len(record.gaps_s))
        yield at, tokens
        for gap in record.gaps_s:
            at += gap
            yield at, tokens


def _over_time(title: str, report: Report, events: Iterable[tuple[float, float]]) -> str:
    width = max(report.duration_s, 1e-9) / _SLICES
    counts = [0.0] * _SLICES
    for at, weight in events:
        counts[max(0, min(_SLICES - 1, int(at / width)))] += weight
    xs = [width * (place + 0.5) for place in range(_SLICES)]
    return line_chart(title, "s", [Line("tokens/s", xs, [count / width for count in counts])])


def _under_way(report: Report) -> Line:
    xs = [max(report.duration_s, 1e-9) * place / _POINTS for place in range(_POINTS + 1)]
    counts = [sum(record.sent_s <= x < record.ended_s for record in report.requests) for x in xs]
    return Line("requests", xs, [float(count) for count in counts])


def _curve(name: str, values: list[float]) -> Line:
    percents = [100 * place / _POINTS for place in range(_POINTS + 1)] if values else []
    ordered = sorted(values)
    return Line(name, percents, [1e3 * percentile(ordered, percent) for percent in percents])
