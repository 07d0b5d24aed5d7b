"""`headrace dead`: list, show, retry and drop the requests that gateways and workers took out of the queues."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from ops.cli.options import SettingsGroup, options, resolve_settings
from ops.cli.running_system import QueueAccess, admin_client, find_admin_nats
from ops.text_table import print_rows, printable_cell
from shared.audit import audited, nats_login
from shared.errors import HeadraceError

if TYPE_CHECKING:
    from ops.cli.dead_letter_box import DeadLetterBox, Selection, StoredLetter


@click.group("dead", cls=SettingsGroup, params=options(QueueAccess))
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """List, show, retry and drop requests in quarantine.

    A request is quarantined when its attempts took workers down, or when it was given up. Needs an administrator's
    credentials.
    """
    ctx.obj = resolve_settings(QueueAccess, values)


def _selecting(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--tenant", help="Only requests of this tenant."),
        click.option("--lane", type=click.Choice(["interactive", "batch"]), help="Only requests of this lane."),
        click.option("--model", help="Only requests for this model."),
    ):
        function = option(function)
    return function


def _naming(function: Callable[..., None]) -> Callable[..., None]:
    function = click.option("--all", "is_all", is_flag=True, help="All that the filters select, without ids.")(function)
    return _selecting(click.argument("ids", metavar="[ID]...", nargs=-1)(function))


@command.command("list")
@_selecting
@click.option("--json", "is_json", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def list_(config: QueueAccess, /, is_json: bool, **filters: Any) -> None:
    """List requests in quarantine, oldest first, without their prompts."""
    selection = _selection(filters)
    rows = list(map(_summary, asyncio.run(_found(config, selection))))
    heads = ["ID", "TENANT", "MODEL", "LANE", "REASON", "ATTEMPTS", "QUARANTINED", "ERROR"]
    print_rows(rows, heads, _cells, _none_of(selection), is_json=is_json)


@command.command()
@_naming
@click.pass_obj
def show(config: QueueAccess, /, ids: tuple[str, ...], is_all: bool, **filters: Any) -> None:
    """Print requests in quarantine whole, prompts included: one JSON object a line."""
    import msgspec

    selection = _selection(filters, ids, is_all)
    found = asyncio.run(_found(config, selection))
    if not found:
        click.echo(_none_of(selection), err=True)
    for stored in found:
        click.echo(json.dumps({"seq": stored.seq} | msgspec.to_builtins(stored.letter)))


@command.command()
@_naming
@click.pass_obj
def retry(config: QueueAccess, /, ids: tuple[str, ...], is_all: bool, **filters: Any) -> None:
    """Put requests back onto the batch queue with a fresh count of attempts.

    An interactive request becomes a batch job of its tenant, since its client has been answered. Prints where each
    result will be.
    """

    async def put_back(box: DeadLetterBox, stored: StoredLetter) -> None:
        result = await box.retry(stored)
        request = stored.letter.request
        click.echo(json.dumps({"id": request.id, "tenant": request.tenant, "result": result}))

    asyncio.run(_each(config, "dead.retry", _selection(filters, ids, is_all), put_back))


@command.command()
@_naming
@click.pass_obj
def drop(config: QueueAccess, /, ids: tuple[str, ...], is_all: bool, **filters: Any) -> None:
    """Delete requests in quarantine for good."""

    async def delete(box: DeadLetterBox, stored: StoredLetter) -> None:
        await box.drop(stored)
        click.echo(json.dumps({"id": stored.letter.request.id, "tenant": stored.letter.request.tenant}))

    asyncio.run(_each(config, "dead.drop", _selection(filters, ids, is_all), delete))


def _selection(filters: dict[str, Any], ids: tuple[str, ...] | None = None, is_all: bool = False) -> Selection:
    from ops.cli.dead_letter_box import Selection

    if ids is not None and bool(ids) == is_all:
        raise click.UsageError("Give request ids, or --all for everything that the filters select.")
    return Selection(**filters, ids=frozenset(ids or ()))


@asynccontextmanager
async def _box(config: QueueAccess) -> AsyncIterator[DeadLetterBox]:
    from ops.cli.dead_letter_box import DeadLetterBox

    url = find_admin_nats(config.nats_url, config.state_dir)
    async with admin_client(url, "headrace-dead", config, config.timeout_s) as client:
        yield DeadLetterBox(client)


async def _found(config: QueueAccess, selection: Selection) -> list[StoredLetter]:
    async with _box(config) as box:
        return await _selected(box, selection)


async def _selected(box: DeadLetterBox, selection: Selection) -> list[StoredLetter]:
    found = [stored async for stored in box.letters(selection)]
    if missing := selection.ids - {stored.letter.request.id for stored in found}:
        named = ", ".join(sorted(missing))
        raise HeadraceError(f"not in quarantine: {named}; `headrace dead list` shows its contents")
    return found


async def _each(
    config: QueueAccess,
    name: str,
    selection: Selection,
    action: Callable[[DeadLetterBox, StoredLetter], Awaitable[None]],
) -> None:
    """Do something to each selected letter, named `name` in the audit log; none is touched when an id is missing.

    Raises `NotRetriedError` at the end if it could not be done to some; it was done to all others.
    """
    from ops.cli.dead_letter_box import NotRetriedError

    refused = []
    user = nats_login(config.nats_user, find_admin_nats(config.nats_url, config.state_dir), config)
    async with _box(config) as box:
        for stored in (found := await _selected(box, selection)):
            request = stored.letter.request
            what = {"id": request.id, "tenant": request.tenant, "model": request.model, "lane": request.lane}
            try:
                with audited(config.audit_log, name, nats_user=user, **what):
                    await action(box, stored)
            except NotRetriedError as error:
                refused.append(str(error))
    if not found:
        click.echo(_none_of(selection), err=True)
    if refused:
        raise NotRetriedError("; ".join(refused))


def _none_of(selection: Selection) -> str:
    of_these = " that these filters select" if selection.model or selection.lane or selection.tenant else ""
    return f"no request is in quarantine{of_these}"


def _summary(stored: StoredLetter) -> dict[str, Any]:
    letter, request = stored.letter, stored.letter.request
    return {
        "id": request.id,
        "tenant": request.tenant,
        "model": request.model,
        "lane": request.lane,
        "reason": letter.reason,
        "error": letter.error,
        "attempts": [{"worker": a.worker, "epoch": a.epoch, "time": a.time, "error": a.error} for a in letter.attempts],
        "quarantined_by": letter.quarantined_by,
        "quarantined": letter.quarantined,
        "num_emitted": len(request.emitted),
        "is_whole": letter.is_whole,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row["quarantined"]))
    names = [printable_cell(row[name]) for name in ("id", "tenant", "model")]
    return [*names, row["lane"], row["reason"], str(len(row["attempts"])), moment, printable_cell(row["error"])]
