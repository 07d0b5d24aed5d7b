"""`headrace keys`: create, list and revoke API keys. Works on the key file alone; gateways notice the change."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ops.cli.options import SettingsGroup, VariableOption, options, resolve_settings
from ops.stack.config import DEFAULT_AUDIT_FILE, DEFAULT_STATE_DIR
from shared.audit import AUDIT_HELP, audited
from shared.config import setting, variable_name


@dataclass(frozen=True, slots=True)
class KeysConfig:
    """Where the keys are, and where is written who changed them."""

    keys_file: Path = setting(DEFAULT_STATE_DIR / "keys.json", "File with the API keys.")
    audit_file: Path | None = setting(None, f"{AUDIT_HELP} Beside the key file if not given.")

    @property
    def audit_log(self) -> Path:
        """Where actions are written down: what belongs to one system stays in one place."""
        return self.audit_file or self.keys_file.parent / DEFAULT_AUDIT_FILE.name


@click.group("keys", cls=SettingsGroup, params=options(KeysConfig))
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Create, list and revoke API keys, by default those of `headrace up`."""
    ctx.obj = resolve_settings(KeysConfig, values)


def _key_option(name: str, *names: str, **attributes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option that describes a key; like a setting it can be given as a variable."""
    variable = variable_name(name.removeprefix("--").replace("-", "_"))
    return click.option(name, *names, cls=VariableOption, envvar=variable, **attributes)


@command.command()
@_key_option("--tenant", default="default", show_default=True, help="Whose requests these are; caches are kept apart.")
@_key_option("--name", default="", help="A note to recognise the key by.")
@_key_option("--allow-model", "models", multiple=True, metavar="MODEL", help="Allow this model only; repeatable.")
@_key_option("--requests-per-minute", type=click.IntRange(1), help="Requests a minute, over all gateways.")
@_key_option("--tokens-per-minute", type=click.IntRange(1), help="Prompt and generated tokens a minute.")
@_key_option("--max-concurrent", type=click.IntRange(1), help="Requests being answered at once.")
@_key_option(
    "--reads-per-minute",
    type=click.IntRange(1),
    help="Reads of stored responses a minute, one for each 64 kB; 1200 if not given.",
)
@_key_option(
    "--max-priority",
    type=click.IntRange(-100, 100),
    default=0,
    show_default=True,
    help="Largest `priority` that requests may ask for; larger ones are refused.",
)
@_key_option("--first", is_flag=True, help="Only where there is no key yet: for scripts that set a system up.")
@click.pass_obj
def create(config: KeysConfig, /, models: tuple[str, ...], first: bool, **record: Any) -> None:
    """Create a key and print it. It is shown only now: only its SHA-256 is kept."""
    from gateway.admission.api_keys import ALL_MODELS, create_key, list_keys
    from shared.errors import InvalidNameError
    from shared.subjects import check_name

    if first and (number := len(list_keys(config.keys_file))):
        noun = "a key, which was" if number == 1 else f"{number} keys, which were"
        click.echo(f"{config.keys_file} has {noun} shown when made; without --first one more is made", err=True)
        return
    try:
        check_name(record["tenant"])
    except InvalidNameError as error:
        raise click.BadParameter(str(error), param_hint="'--tenant'") from None
    models = models or (ALL_MODELS,)
    with audited(config.audit_log, "keys.create", keys_file=config.keys_file, models=models, **record) as what:
        made, key = create_key(config.keys_file, models=models, **record)
        what["key"] = made.id
    click.echo(key)
    click.echo(f"id {made.id}, tenant {made.tenant}, kept in {config.keys_file}", err=True)


@command.command("list")
@click.pass_obj
def list_(config: KeysConfig) -> None:
    """List the keys: what they may do, never the keys themselves."""
    from gateway.admission.api_keys import list_keys

    records = list_keys(config.keys_file)
    if not config.keys_file.exists():
        click.echo(f"there is no {config.keys_file} yet; `headrace keys create` makes it", err=True)
    heads = (
        "ID",
        "TENANT",
        "MODELS",
        "REQ/MIN",
        "TOK/MIN",
        "CONCURRENT",
        "READS/MIN",
        "PRIORITY",
        "CREATED",
        "REVOKED",
        "NAME",
    )
    rows: list[tuple[str, ...]] = [heads]
    for record in records:
        limits = (
            record.requests_per_minute,
            record.tokens_per_minute,
            record.max_concurrent,
            record.reads_per_minute,
            record.max_priority,
        )
        shown = tuple("-" if limit is None else str(limit) for limit in limits)
        dates = (_day(record.created), "-" if record.revoked is None else _day(record.revoked))
        rows.append((record.id, record.tenant, ",".join(record.models), *shown, *dates, record.name))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@command.command()
@click.argument("key_id")
@click.pass_obj
def revoke(config: KeysConfig, key_id: str) -> None:
    """Revoke a key by its id. Gateways refuse it within seconds."""
    from gateway.admission.api_keys import revoke_key

    with audited(config.audit_log, "keys.revoke", keys_file=config.keys_file, key=key_id) as what:
        record = revoke_key(config.keys_file, key_id)
        what["tenant"] = record.tenant
    click.echo(f"{record.id} of tenant {record.tenant} is revoked")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
