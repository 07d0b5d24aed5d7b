"""Typed access to the fields of an untrusted file: each is checked for its type and range where it is used."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from shared.errors import HeadraceError


class CheckedFields(ABC):
    """Fields by name; null counts as absent. What is missing or malformed raises what `error` makes."""

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

    def _present(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value

    def _shown(self, value: Any) -> str:
        return repr(value)[:80]
