"""`headrace alias`: names that stand for served models, changed without a restart."""

from __future__ import annotations

from typing import Any

import click

from ops.cli.operator_port import OperatorAccess, find_operator
from ops.cli.options import SettingsGroup, options, resolve_settings
from ops.text_table import aligned, printable_cell

_INSTEAD = {
    "Did you mean 'set'?": "add create new make update",
    "Did you mean 'ls'?": "list show",
    "Did you mean 'rm'?": "remove delete del drop",
}


@click.group("alias", cls=SettingsGroup, params=options(OperatorAccess), instead=_INSTEAD)
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Let a name stand for a served model.

    A change holds for the next request at every gateway; requests that run end where they began. Needs the operator's
    key.
    """
    ctx.obj = resolve_settings(OperatorAccess, values)


_tenant = click.option("--tenant", help="For this tenant alone, in place of the alias for all.")


@command.command("set")
@click.argument("name")
@click.argument("model")
@_tenant
@click.pass_obj
def set_(access: OperatorAccess, /, name: str, model: str, tenant: str | None) -> None:
    """Let NAME stand for MODEL: a served model or adapter."""
    body = {"name": name, "model": model, "tenant": tenant}
    find_operator(access).call("POST", "/v1/aliases", body)
    click.echo(f"{name} stands for {model}")


@command.command("ls")
@click.pass_obj
def list_(access: OperatorAccess) -> None:
    """List the aliases."""
    rows = [("ALIAS", "TENANT", "MODEL", "CANARY", "STATE")]
    for each in find_operator(access).call("GET", "/v1/aliases")["aliases"]:
        canary = each["canary"]
        state = "hidden by a model of this name" if each["is_hidden"] else "" if each["is_served"] else "not served"
        told = "" if canary is None else f"{canary['percent']:g}% to {canary['model']}"
        names = (each["name"], each["tenant"] or "all", each["model"], told)
        rows.append((*map(printable_cell, names), state))  # type: ignore[arg-type]
    click.echo("\n".join(aligned(rows)))


@command.command("rm")
@click.argument("name")
@_tenant
@click.pass_obj
def remove(access: OperatorAccess, /, name: str, tenant: str | None) -> None:
    """Remove an alias; a canary of it ends."""
    find_operator(access).call("POST", "/v1/aliases/remove", {"name": name, "tenant": tenant})
    click.echo(f"{name} stands for nothing")
