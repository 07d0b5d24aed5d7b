"""`headrace batch list`: the jobs of a tenant that have not ended."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Literal

import click

from ops.cli.admin import QueueAccess, admin_client
from ops.cli.options import checked_name
from ops.cli.running_system import find_admin_nats
from ops.text_table import aligned, printable_cell

_HEADS = ("ID", "MODEL", "QUEUE", "STATE", "AGE")
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(slots=True)
class _Row:
    """What is shown of a job; `queued` is in Unix seconds by NATS's clock."""

    id: str
    tenant: str
    model: str
    queue: str
    queued: float
    age_s: float = 0.0
    state: Literal["waiting", "taken"] = "waiting"


@click.command("list")
@click.option("--tenant", default="default", show_default=True, callback=checked_name, help="Whose jobs.")
@click.option("--model", callback=checked_name, help="Only jobs for this model.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Show the oldest ones.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def list_jobs(config: QueueAccess, /, tenant: str, model: str | None, limit: int, is_json: bool) -> None:
    """List jobs that have not ended, oldest first, without their prompts.

    A job is `waiting` until a worker takes it. One that is `taken` runs, or is given to another worker if its own
    has died. Those of the queue `background` are responses that were created with `background`.
    """
    rows, count = asyncio.run(_rows(config, tenant, model, limit))
    if is_json:
        for row in rows:
            click.echo(json.dumps(asdict(row)))
    elif rows:
        cells = [[*map(printable_cell, (row.id, row.model)), row.queue, row.state, _age(row.age_s)] for row in rows]
        click.echo("\n".join(aligned([_HEADS, *cells])))
    else:
        of_model = "" if model is None else f" for {model!r}"
        click.echo(f"no job of tenant {tenant!r} waits or runs{of_model}", err=True)
    if count > len(rows) == limit:
        click.echo(f"the oldest {len(rows)} of {count} jobs; --limit shows more", err=True)


async def _rows(config: QueueAccess, tenant: str, model: str | None, limit: int) -> tuple[list[_Row], int]:
    """Return the oldest jobs, and how many there are in all."""
    from ops.cli.batch_queue import BatchQueue
    from shared.server_clock import ServerClock

    url = find_admin_nats(config.nats_url, config.state_dir)
    found: list[tuple[int, str, _Row]] = []
    async with admin_client(url, "headrace-batch", config, config.timeout_s) as client:
        await (clock := ServerClock()).synchronize(client)
        queue = BatchQueue(client, tenant, clock)
        async for job in queue.jobs(model):
            # Without the prompt: thousands of them are gigabytes.
            found.append(
                (job.seq, job.consumer, _Row(job.request.id, tenant, job.request.model, job.queue, job.queued))
            )
            if len(found) == limit:
                break
        last = await queue.last_taken({consumer for _, consumer, _ in found})
        count = await queue.count(model)
    now = clock.now()
    for seq, consumer, row in found:
        row.age_s = round(max(0.0, now - row.queued), 3)
        row.state = "taken" if seq <= last[consumer] else "waiting"
    return [row for _, _, row in found], count


def _age(seconds: float) -> str:
    """Write a time in the largest unit of which it has two, or else in seconds."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= 2 * size), _UNITS[-1])
    return f"{seconds / size:.0f} {unit}"
