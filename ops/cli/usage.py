"""`headrace usage`: what each tenant has had of each model, over both lanes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ops.cli.admin import AdminAccess, admin_client
from ops.cli.options import settings_command
from ops.cli.running_system import find_admin_nats
from ops.stack.config import DEFAULT_STATE_DIR
from ops.text_table import aligned
from shared.config import setting
from shared.errors import DependencyError

_MEASURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "device_us", "energy_mj")
_HEADS = ("TENANT", "MODEL", "LANE", "REQUESTS", "PROMPT", "CACHED", "GENERATED", "DEVICE S", "ENERGY J")


@dataclass(frozen=True, slots=True)
class UsageConfig(AdminAccess):
    """Where the totals are."""

    nats_url: str | None = setting(None, "NATS servers; found through the state directory if not given.")
    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")
    tenant: str | None = setting(None, "Only this tenant.")
    json: bool = setting(False, "One JSON object a line.")
    timeout_s: float = setting(10.0, "How long NATS may take to appear.", minimum=0.1)


def run(config: UsageConfig) -> int:
    """Show what each tenant has used of each model, by lane.

    Requests, tokens, device time and energy. The totals are those since the system was set up. They are kept by NATS
    and outlive gateways and workers. For a month, take the difference of two readings. Needs an administrator's
    credentials.
    """
    rows = asyncio.run(_rows(config))
    if config.json:
        for (tenant, model, lane), totals in rows:
            print(json.dumps({"tenant": tenant, "model": model, "lane": lane} | totals))
        return 0
    if config.tenant is not None and not rows:
        print(f"headrace: there is no usage of a tenant {config.tenant!r}", file=sys.stderr)
    table = [_HEADS, *((*names, *(_cell(measure, totals[measure]) for measure in _MEASURES)) for names, totals in rows)]
    print("\n".join(aligned(table)))
    return 0


def _cell(measure: str, total: int) -> str:
    """Return a total as the table has it: time and energy in whole units."""
    scale = {"device_us": 1e6, "energy_mj": 1e3}.get(measure)
    return str(total) if scale is None else f"{total / scale:.3f}"


async def _rows(config: UsageConfig) -> list[tuple[tuple[str, str, str], dict[str, int]]]:
    from nats.errors import Error as NatsError

    from shared.usage_ledger import read_usage

    found: defaultdict[tuple[str, str, str], dict[str, int]] = defaultdict(lambda: dict.fromkeys(_MEASURES, 0))
    url = find_admin_nats(config.nats_url, config.state_dir)
    async with admin_client(url, "headrace-usage", config, config.timeout_s) as client:
        try:
            async for each in read_usage(client.jetstream()):
                if each.measure in _MEASURES and config.tenant in (None, each.tenant):
                    found[each.tenant, each.model, each.lane][each.measure] = each.total
        except NatsError as error:
            raise DependencyError(f"the usage of tenants cannot be read ({error!r}): run `headrace setup`") from error
    return sorted(found.items())


command = settings_command(UsageConfig, "usage", run)
