"""Reads a checkpoint's small files as untrusted input: bounded in size, every field of JSON checked for its type.

The error that every defect of a checkpoint raises.
"""

from __future__ import annotations

import errno
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_worker.quantization.config_fields import CheckedFields
from shared.errors import HeadraceError
from shared.files import open_regular


class CheckpointError(HeadraceError):
    """A model directory cannot be served."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


MAX_BYTES = 64 << 20
"""Vocabularies take up to 35 MB."""


def read_small_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file; `OSError` if it cannot be read or is larger than `max_bytes`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB, which no such file is", str(path))
    return content


def is_inside(path: Path, directory: Path) -> bool:
    """Return True if a file really lies in a model's directory, or where the hub's library keeps what that links to."""
    root = directory.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    return any(path.resolve().is_relative_to(each) for each in roots)


class JsonFile(CheckedFields):
    """One JSON object with typed access to its fields; null counts as absent."""

    def __init__(self, path: Path, fields: Mapping[str, Any], prefix: str = "") -> None:
        super().__init__(fields)
        self.path = path
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> JsonFile:
        """Read a file; `CheckpointError` if it is missing, too large, or not a JSON object."""
        try:
            fields = json.loads(read_small_file(path))
        except OSError as error:
            raise CheckpointError(path, f"cannot be read ({error.strerror}); a model directory needs it") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                path, f"is not valid JSON ({error}); copy it again from where the model came from"
            ) from None
        if not isinstance(fields, dict):
            raise CheckpointError(path, "is not a JSON object")
        return cls(path, fields)

    def with_fields(self, fields: Mapping[str, Any]) -> JsonFile:
        """Return the same place in the file with other fields."""
        return JsonFile(self.path, fields, self._prefix)

    def error(self, name: str, problem: str) -> CheckpointError:
        """Make the error that names a field of this file."""
        return CheckpointError(self.path, f"field {self._prefix + name!r} {problem}")

    def names(self) -> frozenset[str]:
        """Names of the fields that are present."""
        return frozenset(name for name, value in self._fields.items() if value is not None)

    def is_null(self, name: str) -> bool:
        """Whether a field is present and null, where that differs from absent."""
        return name in self._fields and self._fields[name] is None

    def texts(self, name: str) -> tuple[str, ...]:
        """Read a list of strings, empty when absent."""
        value = self._present(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"is {self._shown(value)}; it must be a list of strings")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Read a list of whole numbers that are not negative, empty when absent."""
        value = self._present(name, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
            raise self.error(name, f"is {self._shown(value)}; it must be a list of whole numbers from 0 on")
        return tuple(value)

    def numbers(self, name: str, *, may_be_zero: bool = False) -> tuple[float, ...]:
        """Read a list of finite numbers above zero, or from zero on if `may_be_zero`; empty when absent."""
        value = self._present(name, [])
        is_list = isinstance(value, list) and all(isinstance(item, int | float) for item in value)
        least = 0.0 if may_be_zero else math.ulp(0.0)
        if not is_list or not all(least <= item <= sys.float_info.max for item in value):
            allowed = "from 0 on" if may_be_zero else "above 0"
            raise self.error(name, f"is {self._shown(value)}; it must be a list of numbers {allowed}")
        return tuple(map(float, value))

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Read one token id or a list of them, empty when absent."""
        value = self._present(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31 for item in ids):
            raise self.error(name, f"is {self._shown(value)}; it must be a token id or a list of token ids")
        return tuple(ids)

    def nested(self, name: str) -> JsonFile | None:
        """Read an object, or None when absent."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"is {self._shown(value)}; it must be an object")
        return JsonFile(self.path, value, f"{self._prefix}{name}.")
