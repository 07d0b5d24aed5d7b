"""`headrace batch`: batches of OpenAI's API, and the jobs of the batch lane that have not ended."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import click

from ops.cli.batch_api import BATCH_ID, BatchApi
from ops.cli.batch_files import COMMANDS, ApiAccess, shown_batch
from ops.cli.options import SettingsGroup, checked_name, options, resolve_settings
from ops.cli.running_system import QueueAccess, admin_client, find_admin_nats
from ops.text_table import print_rows, printable_cell
from shared.audit import audited, nats_login
from shared.errors import DependencyError, HeadraceError

if TYPE_CHECKING:
    from ops.cli.batch_queue import QueuedJob

_PAGE = 100
_BATCH_HEADS = ("ID", "ENDPOINT", "STATUS", "COMPLETED", "FAILED", "TOTAL", "AGE")
_HEADS = ("ID", "MODEL", "QUEUE", "STATE", "AGE")
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@click.command("list", params=options(ApiAccess))
@click.option("--jobs", is_flag=True, help="List jobs instead; so do --tenant and --model.")
@click.option("--tenant", callback=checked_name, help="Whose jobs; `default` if not given.")
@click.option("--model", callback=checked_name, help="Only jobs for this model.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Show this many.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def list_(
    config: QueueAccess, /, jobs: bool, tenant: str | None, model: str | None, limit: int, is_json: bool, **api: Any
) -> None:
    """List the batches of the key's tenant, the newest first; with --jobs the jobs that have not ended.

    Jobs are listed from the oldest on, without their prompts. A job is `waiting` until a worker takes it. One that is
    `taken` runs, or is given to another worker if its own has died. Those of the queue `background` are responses that
    were created with `background`.
    """
    if jobs or tenant is not None or model is not None:
        _list_jobs(config, tenant or "default", model, limit, is_json)
    else:
        _list_batches(resolve_settings(ApiAccess, api).api(), limit, is_json)


def _list_batches(api: BatchApi, limit: int, is_json: bool) -> None:
    found: list[dict[str, Any]] = []
    after, has_more = None, True
    while has_more and len(found) < limit:
        page = api.batches(min(_PAGE, limit - len(found)), after)
        found += page["data"]
        after, has_more = page["last_id"], page["has_more"]
    nothing = "no batches; `headrace batch list --jobs` lists jobs"
    print_rows(list(map(shown_batch, found)), _BATCH_HEADS, _batch_cells, nothing, is_json=is_json)
    if has_more:
        click.echo(f"the newest {len(found)} batches; --limit shows more", err=True)


def _batch_cells(batch: dict[str, Any]) -> list[str]:
    counts = batch["request_counts"]
    numbers = (counts["completed"], counts["failed"], counts["total"])
    age = _age(max(0.0, time.time() - batch["created_at"]))
    return [batch["id"], batch["endpoint"], batch["status"], *map(str, numbers), age]


def _list_jobs(config: QueueAccess, tenant: str, model: str | None, limit: int, is_json: bool) -> None:
    rows, count = asyncio.run(_rows(config, tenant, model, limit))
    nothing = f"no job of tenant {tenant!r} waits or runs{'' if model is None else f' for {model!r}'}"
    print_rows(rows, _HEADS, _job_cells, nothing, is_json=is_json)
    if count > len(rows) == limit:
        click.echo(f"the oldest {len(rows)} of {count} jobs; --limit shows more", err=True)


def _job_cells(row: dict[str, Any]) -> list[str]:
    names = (printable_cell(row["id"]), printable_cell(row["model"]))
    return [*names, row["queue"], row["state"], _age(row["age_s"])]


async def _rows(config: QueueAccess, tenant: str, model: str | None, limit: int) -> tuple[list[dict[str, Any]], int]:
    from ops.cli.batch_queue import BatchQueue
    from shared.server_clock import ServerClock

    url = find_admin_nats(config.nats_url, config.state_dir)
    found: list[tuple[int, str, dict[str, Any]]] = []
    async with admin_client(url, "headrace-batch", config, config.timeout_s) as client:
        await (clock := ServerClock()).synchronize(client)
        queue = BatchQueue(client, tenant, clock)
        async for job in queue.jobs(model):
            # Without the prompt: thousands of them are gigabytes. Times are in Unix seconds by NATS's clock.
            request = job.request
            row: dict[str, Any] = {"id": request.id, "tenant": tenant, "model": request.model, "queue": job.queue}
            found.append((job.seq, job.consumer, row | {"queued": job.queued}))
            if len(found) == limit:
                break
        last = await queue.last_taken({consumer for _, consumer, _ in found})
        count = await queue.count(model)
    now = clock.now()
    for seq, consumer, row in found:
        row["age_s"] = round(max(0.0, now - row["queued"]), 3)
        row["state"] = "taken" if seq <= last[consumer] else "waiting"
    return [row for _, _, row in found], count


def _age(seconds: float) -> str:
    """Write a time in the largest unit of which it has two, or else in seconds."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= 2 * size), _UNITS[-1])
    return f"{seconds / size:.0f} {unit}"


@click.group("batch", cls=SettingsGroup, params=options(QueueAccess))
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Submit, watch, list and cancel batches; list and cancel jobs.

    A batch is a file of OpenAI's Batch API: submit, watch and results use the HTTP API and its key. The jobs of all
    batches and publishers are in one queue a tenant: to list and cancel them needs an administrator's credentials.
    """
    ctx.obj = resolve_settings(QueueAccess, values)


for _command in (list_, *COMMANDS):
    command.add_command(_command)


@command.command(params=options(ApiAccess))
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--tenant", default="default", show_default=True, callback=checked_name, help="Whose jobs.")
@click.option("--model", callback=checked_name, help="Only jobs for this model.")
@click.option("--all", "is_all", is_flag=True, help="All jobs that the filters select, without ids.")
@click.pass_obj
def cancel(
    config: QueueAccess, /, ids: tuple[str, ...], tenant: str, model: str | None, is_all: bool, **api: Any
) -> None:
    """Cancel waiting or running batches or jobs: each keeps its output so far, and its result says `cancelled`.

    If no worker answers within two seconds, a job ends with its last saved progress. Prints one JSON object per job.
    A job that has ended keeps its result.
    """
    if bool(ids) == is_all:
        raise click.UsageError("Give ids of jobs, or --all for everything that the filters select.")
    if not all(ids):
        raise click.UsageError(
            "An id is empty; `headrace batch list` shows those of batches, with --jobs those of jobs."
        )
    if batches := [each for each in ids if BATCH_ID.fullmatch(each)]:
        if len(batches) < len(ids):
            raise click.UsageError("Give ids of batches or ids of jobs, not both.")
        client = resolve_settings(ApiAccess, api).api()
        for batch_id in batches:
            click.echo(json.dumps(client.cancel(batch_id)))
        return
    url = find_admin_nats(config.nats_url, config.state_dir)
    user = nats_login(config.nats_user, url, config)
    wanted = frozenset(ids)
    what = {"tenant": tenant, "model": model, "ids": sorted(ids)}
    with audited(config.audit_log, "batch.cancel", nats_user=user, **what) as told:
        cancelled: list[QueuedJob] = []
        try:
            asyncio.run(_cancel(config, url, tenant, model, wanted, cancelled))
        finally:
            told["num_cancelled"] = len(cancelled)
            for job in sorted(cancelled, key=lambda job: job.seq):
                click.echo(json.dumps({"id": job.request.id, "tenant": tenant, "model": job.request.model}))
        if missing := wanted - {job.request.id for job in cancelled}:
            names = ", ".join(sorted(missing))
            problem = f"no job of tenant {tenant!r} that waits or runs has the id {names}; it may have ended"
            if any(each.startswith("batch_") for each in missing):
                problem += "; a batch is named in full, as `headrace batch list` shows it"
            raise HeadraceError(f"{problem}; `headrace batch list --jobs` shows those that have not")


async def _cancel(
    config: QueueAccess, url: str, tenant: str, model: str | None, ids: frozenset[str], cancelled: list[QueuedJob]
) -> None:
    """Cancel the selected jobs and add them to `cancelled`; refusals by NATS are reported after all were tried."""
    from ops.cli.batch_queue import BatchQueue, RefusedCancelError
    from shared.server_clock import ServerClock

    refused: list[str] = []
    async with admin_client(url, "headrace-batch", config, config.timeout_s) as client:
        await (clock := ServerClock()).synchronize(client)
        queue = BatchQueue(client, tenant, clock)

        async def cancel(jobs: list[QueuedJob]) -> None:
            for job in jobs:
                try:
                    if await queue.cancel(job):
                        cancelled.append(job)
                except RefusedCancelError as error:
                    refused.append(str(error))

        try:
            wanted = [job async for job in queue.jobs(model) if not ids or job.request.id in ids]
            waiting, taken = await queue.parted(wanted)
            # What waits goes first, the newest before the others: a worker whose jobs end takes the oldest at once.
            await cancel(waiting[::-1])
            await queue.ask_workers(taken)
            await cancel(taken)
        finally:
            await queue.close()
    if refused:
        raise DependencyError("\n".join(refused))
    if not cancelled and not ids:
        raise DependencyError(f"no job of tenant {tenant!r} waits or runs{'' if model is None else f' for {model!r}'}")
