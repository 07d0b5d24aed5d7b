"""Reads a `quantization_config`, as untrusted as the rest of a checkpoint, into typed fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from shared.errors import HeadraceError

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
