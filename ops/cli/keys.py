"""`headrace keys`: make, change, rotate and revoke API keys, limit tenants, and mark answers.

Works on the key file and the files of limits and watermarks beside it alone; gateways notice the change.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ops.cli.options import SettingsGroup, VariableOption, checked_name, options, resolve_settings
from ops.stack.config import AUDIT_FILE_NAME, DEFAULT_STATE_DIR
from ops.stack.state import holder_of, keys_file_of
from ops.text_table import aligned
from shared.audit import AUDIT_HELP, audited
from shared.config import setting, variable_name

if TYPE_CHECKING:
    from gateway.admission.api_keys import KeyRecord, TenantRecord


@dataclass(frozen=True, slots=True)
class KeysConfig:
    """Where the keys are, and where is written who changed them."""

    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a `headrace up`.")
    keys_file: Path | None = setting(None, "File with the API keys; that of the state directory if not given.")
    audit_file: Path | None = setting(None, f"{AUDIT_HELP} Beside the key file if not given.")

    @property
    def file(self) -> Path:
        """The key file."""
        return self.keys_file or keys_file_of(self.state_dir)

    @property
    def audit_log(self) -> Path:
        """Where actions are written down: what belongs to one system stays in one place."""
        return self.audit_file or self.file.parent / AUDIT_FILE_NAME


@click.group("keys", cls=SettingsGroup, params=options(KeysConfig))
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Make, change, rotate and revoke keys, and limit tenants.

    They are those of a `headrace up`, unless --keys-file names others.
    """
    ctx.obj = resolve_settings(KeysConfig, values)


_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def _key_option(name: str, *names: str, **attributes: Any) -> _Decorator:
    """Add an option that describes a key; like a setting it can be given as a variable."""
    variable = variable_name(name.removeprefix("--").replace("-", "_"))
    return click.option(name, *names, cls=VariableOption, envvar=variable, **attributes)


class _Moment(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """A time from now (`30d`, `12h`, `90m`) or a day in UTC (`2027-01-31`), as Unix seconds; `never` is infinity."""

    name = "TIME"

    def __init__(self, *, may_be_never: bool = True) -> None:
        self._forms = "30d, 12h, 90m, a day such as 2027-01-31" + (", or never" if may_be_never else "")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        if text == "never":
            return math.inf
        try:
            if text[-1:] in _UNIT_S and 0 <= float(text[:-1]) < 1e5:
                moment = time.time() + float(text[:-1]) * _UNIT_S[text[-1]]
            else:
                moment = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        except ValueError:
            self.fail(f"{text!r} is not a time: write {self._forms}", param, ctx)
        if moment <= time.time():
            self.fail(f"{text!r} is past; `headrace keys revoke` ends a key now", param, ctx)
        return moment


_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}


# `MAX_LIMIT` of `gateway.admission.api_keys`, which is not loaded for every command.
_MOST = 2**53


def _checked_models(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    if any(not name.strip() for name in names):
        raise click.BadParameter("a model's name is empty; '*' allows all models", ctx, param)
    return names


def _checked_weight(ctx: click.Context, param: click.Parameter, weight: float | None) -> float | None:
    if weight is not None and math.isnan(weight):
        raise click.BadParameter("nan is not in the range 0.01<=x<=100.", ctx, param)
    return weight


def _checked_overlap(ctx: click.Context, param: click.Parameter, moment: float) -> float:
    if moment == math.inf:
        raise click.BadParameter("the old key ends some time: write 30d, say; another key is `keys create`", ctx, param)
    return moment


def _all_of(*options: _Decorator) -> _Decorator:
    return lambda function: reduce(lambda described, option: option(described), reversed(options), function)


def _limit_options(of: str = "", least: int = 1) -> _Decorator:
    """Add the limits that keys and tenants have; with `least` 0, 0 takes a limit away."""
    end = "" if least else "; 0 takes the limit away"
    kind = click.IntRange(least, _MOST)
    return _all_of(
        _key_option("--requests-per-minute", type=kind, help=f"Requests a minute{of} over all gateways{end}."),
        _key_option("--tokens-per-minute", type=kind, help=f"Prompt and generated tokens a minute{of}{end}."),
        _key_option("--max-concurrent", type=kind, help=f"Requests being answered at once{of}{end}."),
    )


def _describing(*, is_new: bool) -> _Decorator:
    """Add the options that describe a new key, or the changes of an existing one."""
    return _all_of(
        _key_option(
            "--allow-model",
            "models",
            multiple=True,
            metavar="MODEL",
            callback=_checked_models,
            help="Allow this model only; repeatable.",
        ),
        _limit_options(least=int(is_new)),
        _key_option(
            "--reads-per-minute",
            type=click.IntRange(1, _MOST),
            help="Reads of stored data a minute, one for each 64 kB or 16 records of a list; 1200 if not given.",
        ),
        _key_option(
            "--max-priority",
            type=click.IntRange(-100, 100),
            default=0 if is_new else None,
            show_default=is_new,
            help="Largest `priority` that requests may ask for; larger ones are refused.",
        ),
        _key_option(
            "--weight",
            type=click.FloatRange(0.01, 100.0),
            metavar="NUMBER",
            callback=_checked_weight,
            help="While others wait too, requests of this key are served in proportion to it: 0.01 to 100, or 1 if not "
            "given.",
        ),
        _key_option("--expires", type=_Moment(), help="When the key ends: 30d, 12h, 2027-01-31 (UTC), never."),
    )


@command.command()
@_key_option(
    "--tenant",
    default="default",
    show_default=True,
    callback=checked_name,
    help="Whose requests these are; caches are kept apart.",
)
@_key_option("--name", default="", help="A note to recognise the key by; other commands take it for the key's id.")
@_describing(is_new=True)
@_key_option("--first", is_flag=True, help="Only where there is no key yet: for scripts that set a system up.")
@click.pass_obj
def create(config: KeysConfig, /, models: tuple[str, ...], first: bool, expires: float | None, **record: Any) -> None:
    """Create a key and print it. It is shown only now: only its SHA-256 is kept."""
    from gateway.admission.api_keys import ALL_MODELS, create_key, list_keys

    if first and (number := len(list_keys(config.file))):
        noun = "a key, which was" if number == 1 else f"{number} keys, which were"
        click.echo(f"{config.file} has {noun} shown when made; without --first one more is made", err=True)
        return
    if config.keys_file is None and not config.file.exists() and holder_of(config.state_dir) is None:
        click.echo(
            f"no `headrace up` has run with {config.state_dir}: {config.file} is made for one that will", err=True
        )
    record |= {"models": models or (ALL_MODELS,), "expires": _ending(expires)}
    with audited(config.audit_log, "keys.create", keys_file=config.file, **record) as what:
        made, key = create_key(config.file, **record)
        what["key"] = made.id
    _show(config, made, key)


@command.command()
@click.argument("key")
@_describing(is_new=False)
@click.pass_obj
def update(config: KeysConfig, /, key: str, models: tuple[str, ...], expires: float | None, **given: Any) -> None:
    """Change the rights of a key, given by id or name. Gateways know it within seconds."""
    from gateway.admission.api_keys import update_key

    changes: dict[str, Any] = {
        name: value or (0 if name == "max_priority" else None) for name, value in given.items() if value is not None
    }
    changes |= {"models": models} if models else {}
    changes |= {} if expires is None else {"expires": _ending(expires)}
    if not changes:
        raise click.UsageError("Name the settings to change: --requests-per-minute, --expires, ...")
    with audited(config.audit_log, "keys.update", keys_file=config.file, key=key, **changes) as what:
        record = update_key(config.file, key, changes)
        what |= {"key": record.id, "tenant": record.tenant}
    click.echo(f"{record.id} of tenant {record.tenant} is changed")


@command.command()
@click.argument("key")
@click.option(
    "--overlap",
    type=_Moment(may_be_never=False),
    default="1h",
    show_default=True,
    callback=_checked_overlap,
    help="How long the old key still opens.",
)
@click.pass_obj
def rotate(config: KeysConfig, /, key: str, overlap: float) -> None:
    """Make a new key in the place of one, named by id or name, and print it; the old one expires after a while."""
    from gateway.admission.api_keys import list_keys, rotate_key

    with audited(config.audit_log, "keys.rotate", keys_file=config.file, key=key) as what:
        made, shown = rotate_key(config.file, key, max(0.0, overlap - time.time()))
        what |= {"new": made.id, "tenant": made.tenant}
    _show(config, made, shown)
    ends = next((record.expires for record in list_keys(config.file) if record.id == made.replaces), None)
    if ends is not None:
        until = time.strftime("%F %T", time.gmtime(ends))
        click.echo(f"{made.replaces}, the old key, opens until {until} UTC", err=True)


@command.command()
@click.argument("tenant", callback=checked_name)
@_limit_options(" of all its keys together")
@click.pass_obj
def limit(config: KeysConfig, /, tenant: str, **limits: Any) -> None:
    """Limit all keys of a tenant together, replacing its old limits; without options it has none."""
    from gateway.admission.api_keys import limit_tenant, list_keys, tenants_file

    with audited(config.audit_log, "keys.limit", keys_file=config.file, tenant=tenant, **limits):
        limit_tenant(config.file, tenant, limits)
    told = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in limits.items() if value is not None)
    click.echo(f"tenant {tenant}: {told or 'no limits'}, kept in {tenants_file(config.file)}")
    if all(record.tenant != tenant for record in list_keys(config.file)):
        click.echo(f"note: no key in {config.file} is of tenant {tenant}", err=True)


@command.command()
@click.argument("tenant", required=False, callback=checked_name)
@click.option("--key", metavar="KEY", help="In place of a tenant: an API key, by id or name, with a secret of its own.")
@click.option(
    "--model", metavar="NAME", help="Print what `headrace detect` needs for texts of this model: a key a line."
)
@click.option("--rotate", is_flag=True, help="Make a new secret; earlier ones are kept for detection.")
@click.option("--remove", is_flag=True, help="Mark no more answers, and forget all secrets: texts cannot be told then.")
@click.pass_obj
def watermark(
    config: KeysConfig, /, tenant: str | None, key: str | None, model: str | None, rotate: bool, remove: bool
) -> None:
    """Let all answers to a tenant, or to one key, carry a watermark, by a secret that is kept beside the key file."""
    from gateway.admission import watermark_secrets as marks

    if (tenant is None) == (key is None):
        raise click.UsageError("Name a tenant, or an API key by --key KEY: one of both")
    if (model is not None) + rotate + remove > 1:
        raise click.UsageError("--model, --rotate and --remove exclude each other: give one of them")
    makes_one = not (model is not None or remove)
    owner = (
        marks.Marked(tenant or "") if key is None else marks.marked_key(config.file, key, with_revoked=not makes_one)
    )
    told: dict[str, Any] = {"tenant": owner.tenant, "key": owner.key}
    told |= {"model": model, "rotate": rotate, "remove": remove}
    with audited(config.audit_log, "keys.watermark", keys_file=config.file, **told):
        if model is not None:
            click.echo("\n".join(marks.detection_keys(config.file, owner, model)))
            return
        if remove:
            had_one = marks.remove_watermark(config.file, owner)
            click.echo(f"{owner}: {marks.told_after_removal(config.file, owner, had_one)}")
            return
        if rotate:
            marks.rotate_watermark(config.file, owner)
            state = " by a new secret from now on"
        else:
            state = " from now on" if marks.make_watermark(config.file, owner) else ""
    where = marks.watermarks_file(config.file)
    click.echo(f"{owner}: answers are marked{state}; the secret is in {where}, which every gateway needs", err=True)


def _ending(expires: float | None) -> float | None:
    return None if expires in (None, math.inf) else expires


def _show(config: KeysConfig, made: KeyRecord, key: str) -> None:
    click.echo(key)
    click.echo(f"id {made.id}, tenant {made.tenant}, kept in {config.file}", err=True)


@command.command("list")
@_key_option("--json", "is_json", is_flag=True, help="One JSON object a line: the keys, then tenants with limits.")
@click.pass_obj
def list_(config: KeysConfig, is_json: bool) -> None:
    """List keys and tenant limits: their rights, never the keys themselves."""
    from gateway.admission.api_keys import list_keys, list_tenants

    records, tenants = list_keys(config.file), list_tenants(config.file)
    if not config.file.exists():
        click.echo(f"there is no {config.file} yet; `headrace keys create` makes it", err=True)
    if is_json:
        for shown in map(msgspec.structs.asdict, (*records, *tenants)):
            shown.pop("sha256", None)
            click.echo(json.dumps(shown))
        return
    limit_heads = ("REQ/MIN", "TOK/MIN", "CONCURRENT")
    more_heads = ("READS/MIN", "PRIORITY", "WEIGHT", "CREATED", "EXPIRES", "REVOKED", "NAME")
    rows: list[tuple[str, ...]] = [("ID", "TENANT", "MODELS", *limit_heads, *more_heads)]
    for record in records:
        dates = (_day(record.created), _day(record.expires), _day(record.revoked))
        more = (str(record.reads_per_minute), str(record.max_priority), f"{record.weight:g}")
        rows.append((record.id, record.tenant, ",".join(record.models), *_limits(record), *more, *dates, record.name))
    click.echo("\n".join(aligned(rows)))
    if tenants:
        click.echo("\n".join(["", *aligned([("TENANT", *limit_heads), *((t.tenant, *_limits(t)) for t in tenants)])]))


@command.command()
@click.argument("key")
@click.pass_obj
def revoke(config: KeysConfig, key: str) -> None:
    """Revoke a key, named by its id or name, and those that it replaced. Gateways refuse them within seconds."""
    from gateway.admission.api_keys import revoke_key

    began = time.time()
    with audited(config.audit_log, "keys.revoke", keys_file=config.file, key=key) as what:
        record, *replaced = revoke_key(config.file, key)
        what |= {"key": record.id, "tenant": record.tenant, "replaced": [old.id for old in replaced]}
    is_old = record.revoked is not None and record.revoked < began
    click.echo(record.revocation() if is_old else f"{record.id} of tenant {record.tenant} is revoked")
    for old in replaced:
        click.echo(f"{old.id} ({old.name}), which it replaced and which still opened, is revoked too")


def _limits(of: KeyRecord | TenantRecord) -> tuple[str, ...]:
    limits = (of.requests_per_minute, of.tokens_per_minute, of.max_concurrent)
    return tuple("-" if limit is None else str(limit) for limit in limits)


def _day(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d", time.gmtime(seconds))
