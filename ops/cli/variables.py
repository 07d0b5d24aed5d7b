"""Which `HEADRACE_*` variables there are. One that nothing reads is refused: it is misspelt, or of another version."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Collection, Iterator, Mapping

import click

from shared.config import PREFIX
from shared.errors import ConfigError

# Variables of non-commands: the kernels' build, compose.yaml, `make chaos` and `make clients`. AUDIT_FILE is an
# option of many commands, and set for all: to find it among the others' options would import each of them.
_OTHERS = frozenset(
    PREFIX + name
    for name in (
        *("AUDIT_FILE", "CACHE_DIR", "CHAOS_KEEP", "CLIENTS_DIRECTORY", "CPU_KERNELS", "GRAFANA_PASSWORD"),
        *("MODEL_DIR", "NATS_ROUTES", "NATS_SERVER_NAME", "REDIS_PASSWORD", "SPOT_CLOUD"),
    )
)
# Of 1: a name of four letters of which two have changed places has 0.75.
_LIKENESS = 0.7
# NATS takes the passwords of its users from the environment; a file of tenants may ask for more of them.
_NATS_PASSWORD = re.compile(PREFIX + r"NATS_[A-Z0-9_]+_PASSWORD")


class UnknownVariableError(ConfigError):
    """A variable is set that nothing reads."""


def check_variables(own: Collection[str], environ: Mapping[str, str]) -> None:
    """Refuse an unknown variable. Those of other commands are looked up only where `own` do not do.

    Raises:
        UnknownVariableError: There is one; the message names the most similar variable that exists, if possible one of
            this command.
    """
    found = sorted(name for name in environ if name.startswith(PREFIX) and name not in own and name not in _OTHERS)
    strange = [name for name in found if not _NATS_PASSWORD.fullmatch(name)]
    if not strange:
        return
    known = known_variables()
    for name in strange:
        if name not in known:
            nearest = _nearest(name, own) or _nearest(name, known)
            hint = f"did you mean {nearest}?" if nearest else "`headrace COMMAND --help` names those that there are"
            raise UnknownVariableError(name, f"there is no such setting; {hint}")


def _nearest(name: str, variables: Collection[str]) -> str | None:
    """Return the variable whose name is most like this one, without what all of them begin with; None if none is."""
    names = sorted(variable.removeprefix(PREFIX) for variable in variables)
    nearest = difflib.get_close_matches(name.removeprefix(PREFIX), names, 1, _LIKENESS)
    return PREFIX + nearest[0] if nearest else None


def known_variables() -> frozenset[str]:
    """Return all variables that are read, except passwords for NATS; this imports the settings of all commands."""
    group = importlib.import_module("ops.cli.group").headrace
    return _OTHERS | frozenset(_variables(group, click.Context(group)))


def _variables(command: click.Command, ctx: click.Context) -> Iterator[str]:
    for parameter in command.params:
        for variable in (parameter.envvar, *(getattr(parameter, name, None) for name in ("variable", "file_variable"))):
            if variable is not None:
                yield str(variable)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            if (found := command.get_command(ctx, name)) is not None:
                yield from _variables(found, ctx)
