"""Command line options made from settings classes, so that each setting is described in one place."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from shared.config import Constraint, base_type, resolve, shown_bound, variable_name

T = TypeVar("T")
_METAVARS = {"int": "N", "float": "NUMBER", "Path": "PATH", "str": "TEXT"}


def settings_command(
    cls: type[T], name: str, run: Callable[..., int | None], arguments: Sequence[click.Parameter] = ()
) -> click.Command:
    """Make a command that resolves `cls` from its options and the environment and calls `run` with it.

    Arguments of the command line follow by name. The docstring of `run` is the command's help.
    """
    names = [argument.name for argument in arguments]

    def callback(**values: Any) -> int | None:
        given = {key: values.pop(key) for key in names}
        return run(resolve(cls, values, os.environ), **given)

    return click.Command(name, callback=callback, params=[*arguments, *options(cls)], help=run.__doc__)


def options(cls: type[Any]) -> list[click.Option]:
    """Make an option of each setting, a class's own before those it inherits.

    Values stay text: `resolve` converts and checks them, as it does variables.
    """
    hints = typing.get_type_hints(cls)
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__)
    return [_option(field, base_type(hints[field.name])) for field in fields]


def _option(field: dataclasses.Field[Any], kind: type) -> click.Option:
    constraint: Constraint = field.metadata["setting"]
    flag = f"--{field.name.replace('_', '-')}"
    text = f"{constraint.help}  [{'; '.join([variable_name(field.name), *_facts(field, constraint)])}]"
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=text)
    metavar = "|".join(constraint.choices) if constraint.choices else _METAVARS.get(kind.__name__, "TEXT")
    return click.Option([flag, field.name], type=str, default=None, metavar=metavar, help=text)


def _facts(field: dataclasses.Field[Any], constraint: Constraint) -> list[str]:
    facts = []
    has_default = field.default is not dataclasses.MISSING and field.default is not None
    if has_default and not constraint.secret:
        facts.append(f"default {field.default}")
    if constraint.minimum is not None and constraint.maximum is not None:
        facts.append(f"{shown_bound(constraint.minimum)} to {shown_bound(constraint.maximum)}")
    elif constraint.minimum is not None:
        facts.append(f"at least {shown_bound(constraint.minimum)}")
    elif constraint.maximum is not None:
        facts.append(f"at most {shown_bound(constraint.maximum)}")
    return facts
