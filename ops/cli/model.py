"""`headrace model`: load, replace, unload, wake and put to sleep models of hosts while the system runs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import click

from ops.cli.options import SettingsGroup, options, resolve_settings
from ops.cli.running_system import Endpoint, OperatorAccess, find_operator
from ops.cli.status_line import StatusLine
from ops.text_table import aligned, printable_cell
from shared.config import whole_number
from shared.errors import DependencyError

FindOperator = Callable[[], Endpoint]

_PATH = "/v1/hosted_models"
_POLL_S = 0.2


@click.group("model", cls=SettingsGroup, params=options(OperatorAccess))
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Load, replace and unload models while the system runs.

    A host does it: `headrace up`, or `headrace host` on another machine, started with --models-dir. Needs the
    operator's key.
    """
    # Found only by what asks it: help needs no system.
    ctx.obj = partial(find_operator, resolve_settings(OperatorAccess, values))


class _Bytes(click.ParamType[int]):
    """A number of bytes, which may have a unit, as those of settings."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            count = whole_number(value)
        except ValueError:
            count = 0
        if not 1 <= count <= 2**53:
            self.fail(f"{value!r} is not a number of bytes of at least 1, such as 24GB", param, ctx)
        return count


_host = click.option("--host", help="Host that is meant, where several could be.")


_DESCRIBING = (
    click.option("--workers", type=click.IntRange(1, 64), help="Worker processes; 1 if not given."),
    click.option("--on-demand/--always", default=None, help="Load it when requests wait, and let it sleep when idle."),
    click.option(
        "--idle-s",
        type=click.FloatRange(1, 604800),
        help="Of a model loaded on demand: idle seconds until it sleeps; 300 if not given.",
    ),
    click.option(
        "--memory-bytes", type=_Bytes(), help="Memory of one worker; by the files and the KV cache if not given."
    ),
    click.option(
        "--option",
        "options",
        multiple=True,
        metavar="NAME=VALUE",
        help="Setting of its workers, the default where VALUE is empty; may be repeated.",
    ),
    _host,
    click.option("--no-wait", is_flag=True, help="Do not wait until the model serves."),
)


def _described(function: Any) -> Any:
    return reduce(lambda described, option: option(described), reversed(_DESCRIBING), function)


@command.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def list_models(find: FindOperator, as_json: bool) -> None:
    """List the models of all hosts."""
    hosts = find().call("GET", _PATH)["hosts"]
    is_terminal = sys.stdout.isatty()
    click.echo(json.dumps(hosts) if as_json else "\n".join(hosted_table(hosts, whole_errors=not is_terminal)))


@command.command()
@click.argument("name")
@click.argument("path")
@_described
@click.pass_obj
def load(find: FindOperator, /, name: str, path: str, no_wait: bool, **described: Any) -> None:
    """Serve the model of a directory, or a GGUF file, under a name.

    PATH lies under a --models-dir of the host.
    """
    if described["idle_s"] is not None and not described["on_demand"]:
        raise click.UsageError("--idle-s: only a model that is loaded on demand sleeps; give --on-demand too")
    _order(find(), "load", {"name": name, "path": path, **_body(described)}, waits=not no_wait)


@command.command()
@click.argument("name")
@click.argument("path")
@_described
@click.pass_obj
def replace(find: FindOperator, /, name: str, path: str, no_wait: bool, **described: Any) -> None:
    """Let a name mean another model: the old one serves until the new one does, and no request is lost.

    Its mode, idle time, workers, memory and options stay unchanged unless they are given.
    """
    if described["idle_s"] is not None and described["on_demand"] is False:
        raise click.UsageError("--idle-s: a model that always runs does not sleep; leave out --idle-s or --always")
    _order(find(), "replace", {"name": name, "path": path, **_body(described)}, waits=not no_wait)


def _short(action: str, text: str, *, waits: bool = False) -> None:
    @click.argument("name")
    @_host
    @click.pass_obj
    def run(find: FindOperator, name: str, host: str | None) -> None:
        _order(find(), action, {"name": name, **({} if host is None else {"host": host})}, waits=waits)

    command.command(action, help=text)(run)


_short("unload", "Serve a model no more: its workers finish or hand over what they have, and end.")
_short("sleep", "Put a model that is loaded on demand to sleep now.")
_short("wake", "Load a model that sleeps, before requests wait for it.", waits=True)


def _body(described: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, str] = {}
    for text in described["options"]:
        name, is_pair, value = text.partition("=")
        if not is_pair:
            raise click.UsageError(f"--option {text[:64]!r}: write NAME=VALUE, such as max_num_seqs=16")
        found[name.replace("-", "_")] = value
    told = {**described, "options": found, "path": None}
    return {name: value for name, value in told.items() if value is not None}


def _order(operator: Endpoint, action: str, body: dict[str, Any], *, waits: bool) -> None:
    if "path" in body and os.path.exists(body["path"]):
        # Of this machine, if it is the host's too; it checks that itself.
        body["path"] = os.path.abspath(body["path"])
    done = operator.call("POST", f"{_PATH}/{action}", body)
    click.echo(f"{done['host']}: {action} {done['name']}")
    if waits:
        began = time.monotonic()
        try:
            _wait(operator, action, done["host"], done["name"])
        except KeyboardInterrupt:
            click.echo(f"the order goes on; {_HOW_IT_ENDS[action].format(name=done['name'])}", err=True)
            raise
        click.echo(f"{done['name']} serves after {time.monotonic() - began:.1f} s")


# Of orders that are waited for, for those who stop waiting.
_HOW_IT_ENDS = {
    "load": "`headrace model unload {name}` takes it back",
    "replace": "{name} stays what it was until the new one serves, and if that cannot be started; "
    "`headrace model ls` shows it",
    "wake": "once {name} serves, `headrace model sleep {name}` takes it back",
}


def _wait(operator: Endpoint, action: str, host: str, name: str) -> None:
    told, status, began, expected_at = False, StatusLine(), time.monotonic(), 0.0
    while True:
        time.sleep(_POLL_S)
        found = [
            model
            for each in operator.call("GET", _PATH)["hosts"]
            for model in each["models"]
            if (each["host"], model["name"]) == (host, name)
        ]
        if not found:
            raise DependencyError(f"{host} does not have {name} any more")
        (model,) = found
        _check_not_failed(model, action)
        if model["state"] == "no_room" and not told:
            told = True
            click.echo(f"{name} waits for room: no other model can give way yet", err=True)
        if model["num_ready"] and model["num_ready"] == model.get("num_withheld", 0):
            raise DependencyError(f"{name} is loaded, but its workers are cordoned: `headrace uncordon` them")
        if model["num_ready"]:
            status.clear()
            return
        # Where one is replaced, the old one is awake.
        how, now = "the new one loads" if model["state"] == "awake" else model["state"], time.monotonic()
        expected_at = expected_at or now + model["ready_in_s"]
        if model["state"] == "loading" and now > expected_at:
            how += f", longer than the {expected_at - began:.0f} s that were expected"
        elif model["state"] != "awake":
            how += f", ready in {_ready_in(model)}"
        status.show(f"{name}: {how} ({now - began:.0f} s)")


def _check_not_failed(model: dict[str, Any], action: str) -> None:
    """Raise if the order has failed; an error of a model that is still loading is from an earlier start."""
    name, error = model["name"], model["error"]
    if action == "replace" and (undone := model.get("replace_error")):
        raise DependencyError(f"{name} cannot be replaced and stays what it was: {undone}")
    if model["state"] == "failed":
        remedy = f"it is tried again every minute until `headrace model unload {name}`"
        raise DependencyError(f"{name} cannot be started: {error}; {remedy}")
    sleeps = model["state"] in ("asleep", "stopping")
    # One that is woken serves all the same: its error may be that of a replacement that was undone.
    is_incomplete = model["num_ready"] and action != "wake"
    if error and (is_incomplete or sleeps):
        # The old workers are there again, or it sleeps again and nothing starts it.
        raise DependencyError(f"{name} cannot be started: {error}")
    if sleeps:
        raise DependencyError(f"{name} sleeps again: it was ordered to, or no request came for it")


_HEADS = ("MODEL", "HOST", "STATE", "WORKERS", "MODE", "READY IN", "MEMORY", "ERROR")


def hosted_table(hosts: list[dict[str, Any]], *, whole_errors: bool = False) -> list[str]:
    """Return the models of hosts as lines; errors are cut to a cell unless `whole_errors`."""
    errors: dict[str, Any] = {"limit": None} if whole_errors else {}
    rows = [
        (
            printable_cell(model["name"]),
            printable_cell(host["host"]),
            model["state"],
            _workers(model),
            "on demand" if model["on_demand"] else "always",
            _ready_in(model),
            f"{model['need_bytes'] / 1e9:.2f} GB" if model["need_bytes"] else "",
            printable_cell(model["error"] or "", **errors),
        )
        for host in hosts
        for model in host["models"]
    ]
    return aligned([_HEADS, *rows])


def _workers(model: dict[str, Any]) -> str:
    num_withheld = model.get("num_withheld", 0)
    return f"{model['num_ready']}{f', {num_withheld} of them cordoned' if num_withheld else ''}"


def _ready_in(model: dict[str, Any]) -> str:
    """Return when it will serve: empty where that is unknown, and about so where no start has been timed."""
    is_withheld = 0 < model["num_ready"] == model.get("num_withheld", 0)
    if model["state"] == "failed" or is_withheld:
        return ""
    if model["state"] == "awake":
        return "now"
    return f"{'' if model['load_s'] else 'about '}{model['ready_in_s']:.1f} s"
