"""`headrace request ID`: a request's timeline and its cost."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import click

from ops.cli.options import settings_command
from ops.cli.running_system import OperatorAccess, ServerRefusedError, find_operator
from ops.text_table import printable_cell
from shared.config import setting

_LEAST_WIDTH, _MOST_WIDTH = 24, 100
# Of all others, decoding and the answer among them, it is "▓".
_MARKS = {"gateway": "▒", "queue": "░", "prefix": "░", "read": "▒", "wait": "░", "prefill": "█", "preempted": "x"}
_LEGEND = "░ waits  ▒ admission, reading  █ prefill  ▓ decode, answer  x preempted"
_DEFAULT_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class RequestConfig(OperatorAccess):
    """Which request, and how to show it."""

    json: bool = setting(False, "Print all that is known, as one JSON object.")
    slow: bool = setting(False, "List the slowest requests that are kept, instead of one.")
    first: bool = setting(False, "List the requests whose first token took longest, instead of one.")
    running: bool = setting(False, "List the requests that run, the one that has run longest first, instead of one.")
    failed: bool = setting(False, "List the requests that were not answered, instead of one.")


def run(config: RequestConfig, request_id: str | None) -> int:
    """Show a request's timeline and receipt, or list requests.

    Without ID, it lists those that ended last. ID is the answer's `x-request-id`, a batch job's id, or the `id` of a
    line that `/v1/batches` has written. Gateways keep requests for 15 minutes, NATS keeps results of jobs for a week.
    Needs the operator's key.
    """
    given = [name for name in ("slow", "first", "failed", "running") if getattr(config, name)]
    if len(given) > 1:
        raise click.UsageError(f"Give --{given[0]} or --{given[1]}, not both.")
    order = given[0] if given else "recent"
    if request_id is not None and order != "recent":
        raise click.UsageError(f"--{order} lists requests; leave it out to see {request_id[:64]!r}, or give no ID.")
    if request_id == "":
        raise click.UsageError("ID is empty; is the variable set that it comes from?")
    operator = find_operator(config)
    if request_id is None:
        listed = operator.call("GET", f"/console/api/requests?order={order}")["requests"]
        print(json.dumps(listed) if config.json else "\n".join(_list(listed)))
        return 0
    try:
        found = operator.call("GET", f"/console/api/requests/{quote(request_id, safe='')}")["requests"]
    except ServerRefusedError as error:
        if error.code != "request_not_found":
            raise
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found) if config.json else "\n\n".join("\n".join(_shown(view)) for view in found))
    return 0


def _list(requests: list[dict[str, Any]]) -> Iterator[str]:
    # Whole, since they are copied from here.
    width = max([42, *(len(printable_line(each["id"])) + 1 for each in requests)])
    heads = f"{'STATUS':>6} {'OUTCOME':<13}{'FIRST':>9}{'TOTAL':>9}{'TOKENS':>8}{'MOVES':>6}  ERROR"
    yield f"{'ID':<{width}}{'TENANT':<14}{heads}"
    for each in requests:
        first = each.get("first_token_s")
        yield (
            f"{printable_line(each['id']):<{width}}{printable_cell(each['tenant'])[:13]:<14}{each['status'] or '':>6} "
            f"{each['outcome']:<13}{'' if first is None else seconds(first):>9}{seconds(each['ended_s']):>9}"
            f"{each.get('tokens', 0):>8}{each.get('moves', 0):>6}  {printable_cell(each.get('code', ''))}".rstrip()
        )


def _shown(view: dict[str, Any]) -> Iterator[str]:
    timeline = view["timeline"]
    head = [timeline["id"], timeline.get("model", ""), f"tenant {timeline.get('tenant', '')}", timeline["gateway"]]
    yield "  ".join(printable_cell(str(part)) for part in head if part)
    yield ""
    yield from _bars(view["rows"], timeline.get("ended_s", 0.0))
    yield ""
    for event in view["events"]:
        yield f"{seconds(event['at_s']):>10}  {printable_line(event['text'])}"
    yield ""
    yield from _receipt(view["receipt"])


def _bars(rows: list[dict[str, Any]], ended_s: float) -> Iterator[str]:
    label_width = min(44, max(len(row["label"]) for row in rows))
    columns = shutil.get_terminal_size((_DEFAULT_COLUMNS, 0)).columns
    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, columns - label_width - 2))
    for row in rows:
        cells = [" "] * width
        for bar in row["bars"]:
            begin, end = (int(bar[name] / (ended_s or 1.0) * width) for name in ("begin_s", "end_s"))
            # A short bar is one cell, and no later bar hides it.
            for place in range(min(begin, width - 1), min(width, max(end, begin + 1))):
                if cells[place] == " " or bar["kind"] in ("prefill", "preempted"):
                    cells[place] = _MARKS.get(bar["kind"], "▓")
        yield f"{printable_cell(row['label'])[:label_width]:<{label_width}}  {''.join(cells).rstrip()}"
    yield f"{'':<{label_width}}  0{seconds(ended_s):>{width - 1}}"
    yield f"{'':<{label_width}}  {_LEGEND}"


def _receipt(receipt: dict[str, Any]) -> Iterator[str]:
    shares = f"prefill {receipt['prefill_ms']:.1f}, decode {receipt['decode_ms']:.1f}"
    yield f"device {receipt['device_ms']:.1f} ms: {shares}"
    parts = {"rejected drafts": "rejected_ms", "computed again": "recomputed_ms", "earlier attempts": "retries_ms"}
    told = [f"{name} {receipt[key]:.1f}" for name, key in parts.items() if receipt[key]]
    if told:
        yield f"  of which {', '.join(told)}"
    yield (
        f"tokens {receipt['prompt_tokens']} of the prompt, {receipt['cached_tokens']} of them cached; "
        f"{receipt['completion_tokens']} generated"
    )
    if receipt["energy_j"] is not None:
        yield f"energy {receipt['energy_j']:.1f} J"
    if receipt["cost"] is not None:
        yield f"cost {receipt['cost']:.6f}"
    if not receipt["is_complete"]:
        yield "an attempt whose worker did not tell is not in it"


def seconds(value: float) -> str:
    """Return a time as people read it."""
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def printable_line(text: str) -> str:
    """Escape what could move a terminal's cursor."""
    return text if text.isprintable() else json.dumps(text, ensure_ascii=True)[1:-1]


command = settings_command(RequestConfig, "request", run, [click.Argument(["request_id"], required=False)])
