"""The reference of all metrics, for `ops/docs/metrics.md`: `python -m gateway.process.metrics_page`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gateway import metrics
from gateway.fleet import fleet_collector
from gateway.telemetry import model_metrics, worker_rows
from gateway.telemetry.drift_watch import DRIFT_ROW
from gateway.telemetry.row import MetricRow
from gateway.telemetry.stream_watch import STREAM_ROWS, USAGE_ROWS

_SECTIONS: tuple[tuple[str, str, tuple[MetricRow, ...]], ...] = (
    (
        "Requests, by model",
        "Measured by each gateway process. A request may be several sequences (`n`, lists of prompts).",
        (*model_metrics.ROWS.values(), model_metrics.OLD_GAP_ROW),
    ),
    (
        "Tenants",
        "Of requests that were answered, wholly or in part. A process tells 64 models and 64 tenants apart; more are "
        "`other`.",
        tuple(model_metrics.TENANT_ROWS.values()),
    ),
    (
        "Usage",
        "Complete over both lanes, with jobs that were published to NATS, read every 15 seconds by the oldest gateway "
        "process alone. A process that is killed loses what it counted in its last 5 seconds. `headrace usage` shows "
        "the same.",
        tuple(USAGE_ROWS.values()),
    ),
    ("Gateway processes", "", (*metrics.OTHER_ROWS, *metrics.ROWS.values())),
    (
        "Queue and fleet",
        "Shown by the oldest gateway process alone, but for `headrace_queue_oldest_seconds` of the interactive lane: "
        "each process knows its own part.",
        (*fleet_collector.EVERY_ROW, *STREAM_ROWS.values()),
    ),
    (
        "Workers",
        "From heartbeats, at most a second old, shown by the oldest gateway process alone: of some 400 workers, those "
        "that it heard of first. `engine` and `worker` are a worker's name. GPU figures need `headrace[gpu]` and an "
        "NVIDIA driver.",
        (*worker_rows.EVERY_ROW, DRIFT_ROW),
    ),
)
EVERY_ROW = tuple(row for _, _, rows in _SECTIONS for row in rows)

_HEAD = """# Metrics

`GET /metrics` on the operator's port, with the operator's key as a bearer token, exports all metrics below. One
scrape shows all processes that share a port. Scrape every gateway: only one of them, the oldest that is alive, exports
the fleet's metrics, so that sums over gateways count a worker once.

Names that begin with `vllm:` mean what they mean in vLLM, so that dashboards made for it show data: per model, and per
worker where vLLM has an engine. Everything else is Headrace's own. Counters begin at 0 with their process and grow.
Times between tokens are as fine as the gateway's event loop: a millisecond.
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for title, text, rows in _SECTIONS:
        parts.append(f"## {title}\n" + (f"\n{text}\n" if text else "") + "\n" + _table(rows))
    parts.append("This page is made from the code: `python -m gateway.process.metrics_page > ops/docs/metrics.md`.\n")
    return "\n".join(parts)


def _table(rows: Iterable[MetricRow]) -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {row.text} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
