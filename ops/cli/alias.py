"""`headrace alias` and `canary`: names that stand for served models, and models that are tried with a share of them."""

from __future__ import annotations

import math
from typing import Any

import click

from ops.cli.options import SettingsGroup, options, resolve_settings
from ops.cli.running_system import OperatorAccess, find_operator
from ops.text_table import aligned, printable_cell
from shared.errors import HeadraceError


@click.group("alias", cls=SettingsGroup, params=options(OperatorAccess))
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
    """Let NAME stand for MODEL: a served model or adapter. A running canary of NAME ends."""
    operator = find_operator(access)
    before = _aliases(operator.call("GET", "/v1/aliases"), name)
    operator.call("POST", "/v1/aliases", {"name": name, "model": model, "tenant": tenant})
    click.echo(f"{name} stands for {model} for {_whose(tenant)}")
    canary = before.get(tenant, {}).get("canary")
    if canary is not None:
        click.echo(f"its canary, {canary['percent']:g}% to {canary['model']}, is ended")


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
    left = find_operator(access).call("POST", "/v1/aliases/remove", {"name": name, "tenant": tenant})
    click.echo(f"the alias {name} for {_whose(tenant)} is removed")
    for whose, alias in _aliases(left, name).items():
        click.echo(f"{name} still stands for {alias['model']} for {_whose(whose)}")


def _whose(tenant: str | None) -> str:
    return "all tenants" if tenant is None else f"the tenant {tenant}"


def _aliases(told: dict[str, Any], name: str) -> dict[str | None, dict[str, Any]]:
    """Return the aliases of a name, by tenant; None for all tenants."""
    return {each["tenant"]: each for each in told["aliases"] if each["name"] == name}


_HEADS = ("ARM", "MODEL", "REQUESTS", "ERRORS", "TTFT P50", "P99", "ITL P50", "P99", "LOGPROB")


@click.group("canary", cls=SettingsGroup, params=options(OperatorAccess))
@click.pass_context
def canary(ctx: click.Context, /, **values: Any) -> None:
    """Try a model with a share of an alias's requests.

    All requests of a conversation go to the same model. Gateways compare failed answers, times and log probabilities,
    and roll the canary back once it is certainly worse. Needs the operator's key.
    """
    ctx.obj = resolve_settings(OperatorAccess, values)


_of_tenant = click.option("--tenant", help="Of this tenant's alias; that for all if not given.")


class _Number(click.FloatRange):
    """A number within bounds. `nan` is in none of them: it compares false with every bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


_SHARE = _Number(0, 1)
_RATIO = _Number(1, 100)
_PERCENT = _Number(0, 100, min_open=True)


@canary.command()
@click.argument("alias")
@click.option("--to", "model", required=True, metavar="MODEL", help="The model to try.")
@click.option("--percent", type=_PERCENT, required=True, help="Share of conversations.")
@_of_tenant
@click.option("--min-requests", type=click.IntRange(20, 1_000_000), help="Its requests before it is judged; 100.")
@click.option("--max-error-rate", type=_SHARE, help="How much more of its answers may fail; 0.01.")
@click.option("--max-ttft-ratio", type=_RATIO, help="How many times as long its first token may take; 1.5.")
@click.option("--max-itl-ratio", type=_RATIO, help="How many times as long its other tokens may take; 1.5.")
@click.option("--max-logprob-drop", type=_Number(0, 10), help="How much lower its mean log probability may be; 0.2.")
@click.option("--logprob-share", type=_SHARE, help="Share of requests whose log probabilities are compared; 0.1.")
@click.pass_obj
def start(
    access: OperatorAccess, /, alias: str, model: str, percent: float, tenant: str | None, **rules: float | None
) -> None:
    """Send a share of ALIAS's requests to another model."""
    given = {name: value for name, value in rules.items() if value is not None}
    if rules["max_logprob_drop"] is not None and rules["logprob_share"] == 0:
        raise click.UsageError(
            "--max-logprob-drop is not read with --logprob-share 0: no log probabilities are compared"
        )
    body = {"alias": alias, "model": model, "percent": percent, "tenant": tenant, "rules": given}
    canaries = find_operator(access).call("POST", "/v1/canaries", body)["canaries"]
    (begun,) = (each for each in canaries if (each["alias"], each["tenant"]) == (alias, tenant))
    click.echo(f"{percent:g}% of {alias} goes to {model} ({begun['verdict']})")


@canary.command("ls")
@click.pass_obj
def list_canaries(access: OperatorAccess) -> None:
    """List the canaries: those that run, and the last one of each alias."""
    rows = [("ALIAS", "TENANT", "FROM", "TO", "PERCENT", "STATE", "VERDICT")]
    for each in _canaries(access):
        stable, canary = each["arms"]
        names = (each["alias"], each["tenant"] or "all", stable["model"], canary["model"])
        shown = [printable_cell(name) for name in names]
        rows.append((*shown, f"{each['percent']:g}", each["state"], each["verdict"]))
    click.echo("\n".join(aligned(rows)))


@canary.command()
@click.argument("alias")
@_of_tenant
@click.pass_obj
def show(access: OperatorAccess, /, alias: str, tenant: str | None) -> None:
    """Compare both arms of ALIAS's canary."""
    found = [each for each in _canaries(access) if (each["alias"], each["tenant"]) == (alias, tenant)]
    if not found:
        raise HeadraceError(f"the alias {alias!r} has had no canary; `headrace canary ls` shows what there is")
    (each,) = found
    click.echo("\n".join(aligned([_HEADS, *map(_arm, each["arms"])])))
    click.echo(f"{each['state'].replace('_', ' ')}, {each['percent']:g}%: {each['verdict']}")


@canary.command()
@click.argument("alias")
@click.argument("share", type=_PERCENT, metavar="PERCENT")
@_of_tenant
@click.pass_obj
def percent(access: OperatorAccess, /, alias: str, share: float, tenant: str | None) -> None:
    """Send another share to the canary; conversations that it has stay there as the share grows."""
    _change(access, alias, tenant, "percent", percent=share)
    click.echo(f"{share:g}% of {alias} goes to its canary")


@canary.command()
@click.argument("alias")
@_of_tenant
@click.pass_obj
def promote(access: OperatorAccess, /, alias: str, tenant: str | None) -> None:
    """Let ALIAS stand for the canary's model."""
    _change(access, alias, tenant, "promote")
    click.echo(f"{alias} stands for its canary's model")


@canary.command()
@click.argument("alias")
@_of_tenant
@click.pass_obj
def rollback(access: OperatorAccess, /, alias: str, tenant: str | None) -> None:
    """Send all requests of ALIAS to the model that it stands for."""
    _change(access, alias, tenant, "rollback")
    click.echo(f"the canary of {alias} is rolled back")


def _change(access: OperatorAccess, alias: str, tenant: str | None, action: str, **more: float) -> None:
    body = {"alias": alias, "tenant": tenant, "action": action, **more}
    find_operator(access).call("POST", "/v1/canaries/change", body)


def _canaries(access: OperatorAccess) -> list[dict[str, Any]]:
    return list(find_operator(access).call("GET", "/v1/canaries")["canaries"])


def _arm(arm: dict[str, Any]) -> tuple[str, ...]:
    times = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
    shown = ["" if arm[name] is None else f"{1000 * arm[name]:.1f} ms" for name in times]
    logprob = "" if arm["mean_logprob"] is None else f"{arm['mean_logprob']:.3f}"
    return (arm["arm"], printable_cell(arm["model"]), str(arm["requests"]), str(arm["errors"]), *shown, logprob)
