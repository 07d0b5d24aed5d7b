"""`headrace batch`: batches of OpenAI's API, and the jobs of the batch lane that have not ended."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import click

from ops.cli.admin import QueueAccess, admin_client
from ops.cli.batch_api import BATCH_ID
from ops.cli.batch_files import COMMANDS, ApiAccess
from ops.cli.batch_list import list_
from ops.cli.options import SettingsGroup, checked_name, options, resolve_settings
from ops.cli.running_system import find_admin_nats
from shared.audit import audited, nats_login
from shared.errors import DependencyError, HeadraceError

if TYPE_CHECKING:
    from ops.cli.batch_queue import QueuedJob

_INSTEAD = {
    "Did you mean 'cancel'?": "stop delete remove rm del drop abort kill",
    "Did you mean 'submit'? Single jobs are published by `headrace publish`.": "create add new run publish start",
    "Did you mean 'watch'?": "status progress follow wait",
    "Did you mean 'results'?": "result output download get",
    "Did you mean 'list'?": "ls show",
}


@click.group("batch", cls=SettingsGroup, params=options(QueueAccess), instead=_INSTEAD)
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
    """Cancel batches or jobs that wait or run: each ends with what it has, and its result says `cancelled`.

    Where no worker answers within two seconds, it ends with what was last saved of it. Prints one JSON object a job. A
    job that has ended keeps its result.
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
    """Cancel the jobs that are meant and add them to `cancelled`; what NATS refuses is told when all were tried."""
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
