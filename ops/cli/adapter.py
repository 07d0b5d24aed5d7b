"""`headrace adapter`: give, list and take away names of adapters (LoRA) while the system runs."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from ops.cli.options import SettingsGroup, options, resolve_settings
from ops.cli.running_system import Endpoint, OperatorAccess, ServerRefusedError, find_operator
from ops.text_table import aligned, printable_cell
from shared.adapter_files import AdapterContent
from shared.adapter_store import AdapterStore
from shared.config import setting
from shared.errors import HeadraceError
from shared.objects.open import check_store, store_of

_HEADS = ("NAME", "TENANT", "MODEL", "RANK", "SIZE", "CONTENT", "IN MEMORY OF")


@dataclass(frozen=True, slots=True)
class AdapterConfig(OperatorAccess):
    """Where the operator's port is, and the store of adapters."""

    adapters: str | None = setting(
        None,
        "Store of adapters, the same as of gateways and workers: `add` writes it from this machine. Without it the "
        "gateway reads the path on its own.",
    )


class _Access(NamedTuple):
    operator: Endpoint
    store: str | None


@click.group("adapter", cls=SettingsGroup, params=options(AdapterConfig))
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Add, swap and remove adapters (LoRA) while requests run.

    Workers need places for them: --max-loras. Needs the operator's key.
    """
    config = resolve_settings(AdapterConfig, values)
    ctx.obj = _Access(find_operator(config), config.adapters)


_tenant = click.option("--tenant", help="Whose name it is; all tenants share it if not given.")


@command.command()
@click.argument("name")
@click.argument("path")
@_tenant
@click.option("--base", help="Model that the adapter is for, where several are served.")
@click.pass_obj
def add(access: _Access, name: str, path: str, tenant: str | None, base: str | None) -> None:
    """Let a name mean the adapter of a directory, as PEFT saves it.

    A name that means another one is swapped: requests that have begun keep the adapter that they began with.
    """
    body = {"lora_name": name, "tenant": tenant, "base_model_name": base}
    if access.store is not None:
        body["lora_content"] = msgspec.to_builtins(asyncio.run(_put(access.store, Path(path))))
    else:
        if not (os.path.exists(path) or os.path.isabs(path)):
            raise HeadraceError(f"PATH: {path} does not exist here; name a directory of the gateway's host absolutely")
        # Of this machine, if it is the gateway's too.
        body["lora_path"] = os.path.abspath(path) if os.path.exists(path) else path
    _order(access, "load", body)
    found = [each for each in _adapters(access) if (each["name"], each["tenant"]) == (name, tenant)]
    click.echo("\n".join(_table(found)))


@command.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def list_adapters(access: _Access, as_json: bool) -> None:
    """List what names mean, and which workers have it in memory."""
    adapters = _adapters(access)
    click.echo(json.dumps(adapters) if as_json else "\n".join(_table(adapters)))


@command.command()
@click.argument("name")
@_tenant
@click.pass_obj
def rm(access: _Access, name: str, tenant: str | None) -> None:
    """Let a name mean nothing; requests that have begun with it end with it."""
    _order(access, "unload", {"lora_name": name, "tenant": tenant})
    click.echo(f"{name} was removed")


async def _put(place: str, directory: Path) -> AdapterContent:
    check_store(place, "HEADRACE_ADAPTERS")
    store = AdapterStore(store_of(place, "HEADRACE_ADAPTERS"))
    try:
        return await store.put(directory)
    finally:
        await store.close()


def _order(access: _Access, verb: str, body: dict[str, Any]) -> None:
    payload = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    path, headers = f"/v1/{verb}_lora_adapter", {"Content-Type": "application/json"}
    # These calls are vLLM's, and answer with a line of text.
    try:
        access.operator.open("POST", path, payload, headers).read()
    except ServerRefusedError as error:
        # Fields of the body, as this command calls them.
        told = str(error).replace("lora_name: ", "NAME: ").replace("lora_path: ", "PATH: ")
        raise HeadraceError(told.replace("base_model_name: ", "--base: ")) from None


def _adapters(access: _Access) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = access.operator.call("GET", "/v1/adapters")["adapters"]
    return found


def _table(adapters: list[dict[str, Any]]) -> list[str]:
    rows = [
        (
            printable_cell(each["name"]),
            printable_cell(each["tenant"] or "all"),
            printable_cell(each["base"]),
            str(each["rank"] or ""),
            f"{each['bytes'] / 1e6:.1f} MB" if each["bytes"] else "",
            each["digest"][:12],
            printable_cell(", ".join(each["workers"])),
        )
        for each in adapters
    ]
    return aligned([_HEADS, *rows])
