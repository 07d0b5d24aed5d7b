"""`headrace usage`: what each tenant has had of each model, over both lanes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from ops.cli.options import settings_command
from ops.cli.running_system import OperatorAccess, find_operator
from ops.text_table import aligned, printable_cell
from shared.config import setting

_NAMES = ("tenant", "model", "lane")
# By measure, its head and its unit as the table has it.
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


def run(config: UsageConfig) -> int:
    """Show what each tenant has used of each model, by lane.

    Requests, tokens, device time and energy since the system was set up. NATS keeps the totals, which outlive gateways
    and workers. For a month, take the difference of two readings. Needs the operator's key.
    """
    found = find_operator(config).call("GET", "/console/api/tenants")["use"]
    used = [dict.fromkeys(_COLUMNS, 0) | each for each in found if config.tenant in (None, each["tenant"])]
    if config.json:
        for each in used:
            print(json.dumps({name: each[name] for name in (*_NAMES, *_COLUMNS)}))
        return 0
    if config.tenant is not None and not used:
        print(f"headrace: there is no usage of a tenant {config.tenant!r}", file=sys.stderr)
    rows = [(*map(str.upper, _NAMES), *(head for head, _ in _COLUMNS.values()))]
    for each in used:
        cells = (
            str(each[name]) if unit is None else f"{each[name] / unit:.3f}" for name, (_, unit) in _COLUMNS.items()
        )
        rows.append((*(printable_cell(each[name]) for name in _NAMES), *cells))
    print("\n".join(aligned(rows)))
    return 0


command = settings_command(UsageConfig, "usage", run)
