"""`headrace top` and `usage`: the live state, and each tenant's usage of each model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ops.cli.model import hosted_table
from ops.cli.options import settings_command
from ops.cli.running_system import OperatorAccess, ServerRefusedError, find_operator, tell
from ops.text_table import aligned, printable_cell
from shared.config import setting

_CLEAR = "\x1b[H\x1b[J"
_WORKER_HEADS = ("WORKER", "MODEL", "RUN", "WAIT", "KV", "TOKENS/S", "PREFILL/S", "BUSY", "CACHED", "STATE")
_GATEWAY_HEADS = ("GATEWAY", "STREAMS", "SHED", "LIMITED", "MOVED", "TOKENS/S", "CPU")


@dataclass(frozen=True, slots=True)
class TopConfig(OperatorAccess):
    """How often, and for how long."""

    interval_s: float = setting(2.0, "Seconds between two looks.", minimum=0.5, maximum=60)
    once: bool = setting(False, "Look twice, print once, and end.")
    json: bool = setting(False, "Print the operator port's data as a line of JSON each time.")


def run(config: TopConfig) -> int:
    """Show workers, queues and rates until Ctrl-C. Needs the operator's key.

    It reports a look that fails and goes on; the first look, and both of `--once`, must succeed.
    """
    operator, before = find_operator(config), None
    while True:
        try:
            now = operator.call("GET", "/console/api/now")
        except ServerRefusedError as error:
            if before is None or config.once:
                raise
            tell(f"{time.strftime('%H:%M:%S')}: {error}")
        else:
            _show(before, now, config)
            if config.once and (config.json or before is not None):
                return 0
            before = now
        time.sleep(config.interval_s)


def _show(before: dict[str, Any] | None, now: dict[str, Any], config: TopConfig) -> None:
    if config.json:
        print(json.dumps(now), flush=True)
    elif before is not None:
        clear = _CLEAR if sys.stdout.isatty() and not config.once else ""
        print(clear + "\n".join(screen(before, now)), flush=True)


def screen(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of two looks at a system."""
    passed_s = max(1e-3, now["at"] - before["at"])
    yield time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now["at"]))
    yield ""
    rows = [("MODEL", "LANE", "WAITING", "OLDEST")]
    rows += [
        (printable_cell(each["model"]), each["lane"], str(each["waiting"]), f"{each['oldest_s']:.1f} s")
        for each in now["queues"]
    ]
    yield from aligned(rows)
    yield ""
    if any(host["models"] for host in now.get("hosts", ())):
        yield from hosted_table(now["hosts"])
        yield ""
    yield from aligned([_WORKER_HEADS, *(_worker(each, before, passed_s) for each in now["workers"])])
    yield ""
    yield from aligned([_GATEWAY_HEADS, *(_gateway(each, before, passed_s) for each in now["gateways"])])


def _worker(each: dict[str, Any], before: dict[str, Any], passed_s: float) -> tuple[str, ...]:
    earlier = [other for other in before["workers"] if other["worker"] == each["worker"]]
    last = earlier[0] if earlier and earlier[0]["started"] == each["started"] else each
    used = 1 - each["free_blocks"] / each["total_blocks"] if each["total_blocks"] else 0.0
    asked = each["prompt_tokens"] - last["prompt_tokens"]
    cached = f"{100 * (each['prefix_hits'] - last['prefix_hits']) / asked:.0f}%" if asked > 0 else ""
    return (
        printable_cell(each["worker"]),
        printable_cell(each["model"]),
        f"{each['running']}/{each['max_num_seqs']}",
        str(each["waiting"]),
        f"{100 * used:.0f}%",
        f"{rate(each, last, 'generation_tokens', passed_s):.0f}",
        f"{rate(each, last, 'prefill_tokens', passed_s):.0f}",
        f"{100 * min(1.0, rate(each, last, 'busy_s', passed_s)):.0f}%",
        cached,
        _state(each),
    )


def _state(each: dict[str, Any]) -> str:
    golden = each.get("golden") or {}
    told = [f"role {each['role']}"] if each.get("role") else []
    if problem := golden.get("problem"):
        told.append(f"{'withdrawn' if golden['has_withdrawn'] else 'goes on'}: {problem}")
    elif each["draining"]:
        told.append("draining, then ends" if each.get("is_ending") else "cordoned")
    return printable_cell("; ".join(told))


def _gateway(each: dict[str, Any], before: dict[str, Any], passed_s: float) -> tuple[str, ...]:
    last = next((other for other in before["gateways"] if other["gateway"] == each["gateway"]), each)
    return (
        printable_cell(each["gateway"]),
        str(each["streams"]),
        str(sum(each["shed"].values())),
        str(sum(each["limited"].values())),
        str(sum(each["moves"].values())),
        f"{rate(each, last, 'completion_tokens', passed_s):.0f}",
        f"{100 * rate(each, last, 'cpu_s', passed_s):.0f}%",
    )


def rate(now: dict[str, Any], before: dict[str, Any], name: str, passed_s: float) -> float:
    """Return by how much a counter grew in a second."""
    return max(0.0, float(now[name] - before[name]) / passed_s)


command = settings_command(TopConfig, "top", run)


_NAMES = ("tenant", "model", "lane")
# Table head and unit by measure.
_COLUMNS = {
    "requests": ("REQUESTS", None),
    "prompt_tokens": ("PROMPT", None),
    "cached_tokens": ("CACHED", None),
    "completion_tokens": ("GENERATED", None),
    "device_us": ("DEVICE S", 1e6),
    "energy_mj": ("ENERGY J", 1e3),
}


@dataclass(frozen=True, slots=True)
class UsageConfig(OperatorAccess):
    """Of whom, and how to show it."""

    tenant: str | None = setting(None, "Only this tenant.")
    json: bool = setting(False, "One JSON object a line.")


def usage(config: UsageConfig) -> int:
    """Show each tenant's usage of each model, by lane.

    Requests, tokens, device time and energy since the system was set up. NATS keeps the totals, which outlive gateways
    and workers. Days and hours are read with a key of the tenant, at `/v1/usage`. Needs the operator's key.
    """
    found = find_operator(config).call("GET", "/console/api/tenants")["use"]
    used = [_shown_use(each) for each in found if config.tenant in (None, each["tenant"])]
    if config.json:
        for each in used:
            print(json.dumps({name: each[name] for name in (*_NAMES, *_COLUMNS)}))
        return 0
    if config.tenant is not None and not used:
        print(f"headrace: there is no usage of a tenant {config.tenant!r}", file=sys.stderr)
    rows = [(*map(str.upper, _NAMES), *(head for head, _ in _COLUMNS.values()))]
    for each in used:
        cells = (
            "-" if each[name] is None else str(each[name]) if unit is None else f"{each[name] / unit:.3f}"
            for name, (_, unit) in _COLUMNS.items()
        )
        rows.append((*(printable_cell(each[name]) for name in _NAMES), *cells))
    print("\n".join(aligned(rows)))
    return 0


def _shown_use(each: dict[str, Any]) -> dict[str, Any]:
    """Return all measures of a tenant's use; the energy is None where no device told it."""
    return dict.fromkeys(_COLUMNS, 0) | each | {"energy_mj": each.get("energy_mj") or None}


USAGE = settings_command(UsageConfig, "usage", usage)
