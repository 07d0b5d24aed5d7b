"""msgspec's validation errors, in words for the author of the value: the field, and the allowed values.

msgspec's own texts speak of Python's types and of paths such as `$.messages[0].content`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_PATH = re.compile(r"^(?P<detail>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_JSON_NAMES = {"float": "number", "int": "integer", "str": "string", "bool": "boolean"}


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One thing that is wrong.

    Attributes:
        kind: For `unknown` and `missing`, `field` is the name of that field, and `text` is empty.
        field: As in `messages.[1].content`; None for the whole value.
        text: The expected values, for `invalid`; begins with a small letter.
        is_key: The name within the field is wrong, not its value.
    """

    kind: Literal["unknown", "missing", "invalid"]
    field: str | None
    text: str = ""
    is_key: bool = False

    def sentence(self, whole: str) -> str:
        """Say it, with `whole` as the name of the whole value; begins with that, or with the field."""
        if self.kind == "unknown":
            return f"{self.field!r} is not a field of {whole}"
        if self.kind == "missing":
            return f"{self.field!r} is missing"
        return f"{self.subject(whole)} is invalid: {self.text}"

    def subject(self, whole: str) -> str:
        """Name the invalid part."""
        if self.field is None:
            return whole
        return f"A key of '{self.field}'" if self.is_key else f"'{self.field}'"


def field_problem(error: Exception) -> FieldProblem:
    """Read a `msgspec.ValidationError`."""
    match = _PATH.match(str(error))
    assert match is not None
    detail, path = match["detail"], match["path"] or ""
    field = path.replace("[...]", "").replace("[", ".[").lstrip(".") or None
    inner = f"{field}." if field else ""
    if (unknown := _UNKNOWN.match(detail)) is not None:
        return FieldProblem("unknown", f"{inner}{unknown[1]}")
    if (missing := _MISSING.match(detail)) is not None:
        return FieldProblem("missing", f"{inner}{missing[1]}")
    text = re.sub(r"`([^`]*)`", _json_types, detail)
    return FieldProblem("invalid", field, f"{text[:1].lower()}{text[1:]}", match["key"] is not None)


def _json_types(found: re.Match[str]) -> str:
    return " or ".join(_JSON_NAMES.get(part, part) for part in found[1].split(" | "))
