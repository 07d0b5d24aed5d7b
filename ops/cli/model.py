"""`headrace model`: load, replace, unload, wake and put to sleep models of hosts while the system runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from ops.cli.hosted_table import hosted_table
from ops.cli.operator_port import OperatorAccess, find_operator
from ops.cli.options import SettingsGroup, options, resolve_settings
from ops.cli.running_system import Endpoint
from shared.errors import DependencyError

_PATH = "/v1/hosted_models"
_POLL_S = 0.2
_INSTEAD = {
    "Did you mean 'ls'?": "list show ps status get",
    "Did you mean 'load'?": "add create start serve",
    "Did you mean 'unload'?": "rm remove delete stop del",
    "Did you mean 'replace'?": "update swap set",
}


@dataclass(frozen=True, slots=True)
class ModelConfig(OperatorAccess):
    """Where the operator's port is."""


@click.group("model", cls=SettingsGroup, params=options(ModelConfig), instead=_INSTEAD)
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Load, replace and unload models while the system runs.

    A host does it: `headrace up`, or `headrace host` on another machine, started with --models-dir. Needs the
    operator's key.
    """
    ctx.obj = find_operator(resolve_settings(ModelConfig, values))


_host = click.option("--host", help="Host that is meant, where several could be.")
_no_wait = click.option("--no-wait", is_flag=True, help="Do not wait until the model serves.")


def _described(function: Any) -> Any:
    """Add the options that describe a model."""
    for option in reversed(
        (
            click.option("--workers", type=click.IntRange(1, 64), default=1, help="Worker processes."),
            click.option("--on-demand", is_flag=True, help="Load it when requests wait; let it sleep when idle."),
            click.option(
                "--idle-s",
                type=click.FloatRange(1, 604800),
                default=300.0,
                help="With --on-demand: idle time to sleep.",
            ),
            click.option(
                "--memory-bytes",
                type=click.IntRange(1),
                help="Memory of one worker; by the files and the KV cache if not given.",
            ),
            click.option(
                "--option",
                "options",
                multiple=True,
                metavar="NAME=VALUE",
                help="Setting of its workers; may be repeated.",
            ),
            _host,
            _no_wait,
        )
    ):
        function = option(function)
    return function


@command.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def list_models(operator: Endpoint, as_json: bool) -> None:
    """List the models of all hosts."""
    hosts = operator.call("GET", _PATH)["hosts"]
    click.echo(json.dumps(hosts) if as_json else "\n".join(hosted_table(hosts)))


@command.command()
@click.argument("name")
@click.argument("path")
@_described
@click.pass_obj
def load(operator: Endpoint, /, name: str, path: str, no_wait: bool, **described: Any) -> None:
    """Serve the model of a directory, or a GGUF file, under a name.

    PATH lies under a --models-dir of the host.
    """
    _order(operator, "load", {"name": name, "path": path, **_body(described)}, waits=not no_wait)


@command.command()
@click.argument("name")
@click.argument("path")
@_described
@click.pass_obj
def replace(operator: Endpoint, /, name: str, path: str, no_wait: bool, **described: Any) -> None:
    """Let a name mean another model: the old one serves until the new one does, and no request is lost."""
    _order(operator, "replace", {"name": name, "path": path, **_body(described)}, waits=not no_wait)


def _short(action: str, text: str, *, waits: bool = False) -> None:
    @click.argument("name")
    @_host
    @click.pass_obj
    def run(operator: Endpoint, name: str, host: str | None) -> None:
        _order(operator, action, {"name": name, **({} if host is None else {"host": host})}, waits=waits)

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
        _wait(operator, done["host"], done["name"])
        click.echo(f"{done['name']} serves after {time.monotonic() - began:.1f} s")


def _wait(operator: Endpoint, host: str, name: str) -> None:
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
        if model["state"] == "failed" or (model["error"] and model["num_ready"]):
            # Of one that could not be replaced, the old workers are there again.
            raise DependencyError(f"{name} cannot be started: {model['error']}")
        if model["num_ready"]:
            return
