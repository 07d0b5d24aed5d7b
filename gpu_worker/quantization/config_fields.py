"""Typed, checked fields of untrusted files, and the reader of `quantization_config`.

Patterns are regular expressions, so only those that cannot take forever are compiled.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from shared.errors import HeadraceError


class CheckedFields(ABC):
    """Fields by name; null counts as absent. Missing or malformed fields raise the exception of `error`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields as they were read, for a reader that checks them itself."""
        return self._fields

    @abstractmethod
    def error(self, name: str, problem: str) -> HeadraceError:
        """Make the error that names a field."""

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """Read a whole number, required unless there is a default."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(name, f"is {self._shown(value)}; it must be a whole number from {minimum} to {maximum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number above zero, required unless there is a default."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.error(name, f"is {self._shown(value)}; it must be a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Read a finite number above zero, or None when absent."""
        return None if self._fields.get(name) is None else self.number(name)

    def boolean(self, name: str, default: bool) -> bool:
        """Read true or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {self._shown(value)}; it must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Read a string, required unless there is a default."""
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"is {self._shown(value)}; it must be a string")
        return value

    def require(self, name: str, served: bool | int | str, meaning: str = "") -> None:
        """Refuse a field that is there and is not `served`, the one value that is; `meaning` tells what that is."""
        given: bool | int | str
        if isinstance(served, bool):
            given = self.boolean(name, served)
        elif isinstance(served, int):
            given = self.integer(name, served, minimum=0)
        else:
            given = self.text(name, served)[:80]
        shown, supported = (str(value).lower() if isinstance(value, bool) else repr(value) for value in (given, served))
        if given != served:
            raise self.error(name, f"is {shown}; supported: {supported}{meaning and ', '}{meaning}")

    def _present(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value

    def _shown(self, value: Any) -> str:
        return repr(value)[:80]


Fields = TypeVar("Fields", bound=msgspec.Struct)


OTHER_FORMS = "take the same model in 16 bits, which `headrace quantize` makes smaller, or in FP8, GPTQ, AWQ or GGUF"
"""What helps where no part of a form is served."""


class QuantizationError(HeadraceError):
    """A field of a `quantization_config`, whose whole path is `field`, is missing, malformed or not supported."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = f"quantization_config.{field}".removesuffix(".")
        super().__init__(f"{self.field!r} {problem}")
        self.problem = problem


def read_fields(config: Mapping[str, Any], kind: type[Fields], place: str = "") -> Fields:
    """Read the fields of `kind` from an object at `place` below `quantization_config`; others are ignored.

    Raises:
        QuantizationError: A field is missing or of the wrong type.
    """
    present = {name: value for name, value in config.items() if value is not None}
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        field = ".".join(part for part in (place, path.strip(".`")) if part)
        raise QuantizationError(field, f"cannot be read: {problem}") from None


def check_choice(field: str, value: Any, supported: tuple[Any, ...]) -> None:
    """Check that a field has a supported value; `QuantizationError` if not."""
    if value not in supported:
        allowed = ", ".join(repr(choice) for choice in supported)
        raise QuantizationError(field, f"is {str(value)[:80]!r}; supported: {allowed}")


_MAX_LENGTH = 1000
_MAX_PATHS = 1 << 20
# Average number of choices of each of several repeats in a name of some forty characters.
_PATHS_OF_A_REPEAT = 16
# A repeated group, whose matching can take exponential time; and kinds of group that have no use here.
_REFUSED = re.compile(r"\)[*+{]|\(\?(?![:=!])")
# Tokens that decide the number of ways of matching; escaped characters and character classes are skipped whole.
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\??|[)|?*+{]", re.DOTALL)


def compile_pattern(field: str, text: str) -> re.Pattern[str]:
    """Compile a regular expression, matched from a name's beginning; `QuantizationError` if wrong or too slow."""
    shown = repr(text[:80])
    if len(text) > _MAX_LENGTH or _REFUSED.search(text) or _num_paths(text) > _MAX_PATHS:
        limits = f"at most {_MAX_LENGTH} characters, 5 repeats (fewer beside alternatives), and no repeated group"
        raise QuantizationError(field, f"has the pattern {shown}; a pattern may have {limits}")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise QuantizationError(
            field, f"has the pattern {shown}, which is not a regular expression ({error})"
        ) from None


def _num_paths(text: str) -> int:
    """Return about how many ways of matching are tried at worst: the product of all choices that the pattern has."""
    paths = 1
    alternatives = [1]
    for token in _TOKEN.findall(text):
        if token.startswith("("):
            alternatives.append(1)
        elif token == ")" and len(alternatives) > 1:
            paths *= alternatives.pop()
        elif token == "|":
            alternatives[-1] += 1
        elif token == "?":
            paths *= 2
        elif token in "*+{":
            paths *= _PATHS_OF_A_REPEAT
    for count in alternatives:
        paths *= count
    return paths
