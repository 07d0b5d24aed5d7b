"""Settings: declared once as dataclass fields, resolved once at start, from options and `HEADRACE_*` variables.

A settings class is a frozen dataclass whose fields are made with `setting()`. `resolve()` builds it from explicit
values and the environment, and fails fast with the variable's name and the allowed values. Whole numbers may be written
as vLLM takes them, 4k (4000) or 4K (4096), and with units of bytes, 8GB or 8GiB. The command line makes its
options from the same fields, so a setting is described in one place. A secret can be kept in a file that a second
variable names, `HEADRACE_NATS_PASSWORD_FILE` for `HEADRACE_NATS_PASSWORD`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import ConfigError

PREFIX = "HEADRACE_"
REQUIRED = dataclasses.MISSING
"""As the default of a setting: it has to be given."""
T = TypeVar("T")

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_KINDS: dict[type, str] = {int: "a whole number", float: "a number", Path: "a path"}
_WITH_UNIT = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[kmgtKMGT]|[KMGT]i?B)")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The allowed values of a setting, and its description in `--help`.

    Attributes:
        secret: The value is not shown, and can be given in a file.
        alias: A second name of the option.
        synonyms: Other servers' names of some choices.
        is_never_empty: An option without a value, as of a variable that is not set, is refused and not ignored.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] | None = None
    secret: bool = False
    alias: str | None = None
    synonyms: Mapping[str, str] | None = None
    is_never_empty: bool = False


def setting(default: Any, help: str, **allowed: Any) -> Any:
    """Declare a setting as a dataclass field; `allowed` are the fields of its `Constraint`.

    A callable default is called once per resolution.
    """
    metadata = {"setting": Constraint(help, **allowed)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def variable_name(field_name: str) -> str:
    """Name of the environment variable of a setting."""
    return PREFIX + field_name.upper()


def file_variable(variable: str) -> str:
    """Name of the variable that names the file with a secret."""
    return f"{variable}_FILE"


def resolve(cls: Callable[..., T], values: Mapping[str, Any], environ: Mapping[str, str]) -> T:
    """Build a settings object: `values` that are not None win over the environment, which wins over defaults.

    Raises:
        ConfigError: A value has the wrong type or is outside its bounds, a secret's file cannot be used, or a required
            setting is not given.
    """
    hints = typing.get_type_hints(cls)
    resolved: dict[str, Any] = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        variable = variable_name(item.name)
        constraint: Constraint = item.metadata["setting"]
        raw = values.get(item.name)
        if raw is None:
            raw = environ.get(variable)
        if not raw and constraint.secret and (file := environ.get(file_variable(variable))):
            raw = _read_secret(file_variable(variable), Path(file))
        if constraint.is_never_empty and values.get(item.name) == "":
            raise ConfigError(variable, "is empty: give a value, or leave it out")
        if raw is None or raw == "":
            if item.default is item.default_factory is REQUIRED:
                raise ConfigError(variable, "is required")
            continue
        if isinstance(raw, str) and constraint.synonyms:
            raw = constraint.synonyms.get(raw, raw)
        resolved[item.name] = _checked(variable, _convert(variable, raw, hints[item.name]), constraint)
    return cls(**resolved)


def shown_bound(bound: float) -> str:
    """Return a bound as people type it: `1048576`, not `1.04858e+06`."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def base_type(annotation: Any) -> type:
    """Return the plain type of a setting: `int` for `int | None`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = next(arg for arg in typing.get_args(annotation) if arg is not types.NoneType)
    return typing.cast("type", annotation)


def _read_secret(variable: str, file: Path) -> str:
    try:
        # Editors of Windows put the mark of UTF-8 first.
        secret = file.read_text("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(variable, f"{file} cannot be read: {reason}") from error
    if not secret:
        raise ConfigError(variable, f"{file} is empty; it has to hold the secret alone")
    return secret


def _convert(variable: str, raw: Any, annotation: Any) -> Any:
    kind = base_type(annotation)
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        if str(raw).lower() not in _BOOLEANS:
            raise ConfigError(variable, f"{raw!r} is not a boolean; use true or false")
        return _BOOLEANS[str(raw).lower()]
    try:
        return whole_number(raw) if kind is int else kind(raw)
    except (TypeError, ValueError):
        raise ConfigError(variable, f"{raw!r} is not {_KINDS.get(kind, 'usable')}") from None


def whole_number(raw: Any) -> int:
    """Return a whole number that may have a unit; `ValueError` or `TypeError` if it is none."""
    if not isinstance(raw, str) or (found := _WITH_UNIT.fullmatch(raw.strip())) is None:
        return int(raw)
    unit = found["unit"]
    # As vLLM and GNU tools read it: k and KB are decimal, K and KiB binary.
    is_binary = unit[0].isupper() and unit[1:] != "B"
    value = Decimal(found["number"]) * (1024 if is_binary else 1000) ** ("KMGT".index(unit[0].upper()) + 1)
    if value != int(value):
        raise ValueError(raw)
    return int(value)


def _checked(variable: str, value: Any, constraint: Constraint) -> Any:
    if constraint.choices is not None and value not in constraint.choices:
        raise ConfigError(variable, f"{value!r} is not one of {', '.join(constraint.choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(variable, f"must be a finite number, not {value}")
    if constraint.minimum is not None and value < constraint.minimum:
        raise ConfigError(variable, f"{value} is too small; the least allowed is {shown_bound(constraint.minimum)}")
    if constraint.maximum is not None and value > constraint.maximum:
        raise ConfigError(variable, f"{value} is too large; the most allowed is {shown_bound(constraint.maximum)}")
    return value
