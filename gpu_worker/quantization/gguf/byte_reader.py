"""Reads numbers and strings from a GGUF file's header, never beyond its end.

Every size that the file names is checked against the bytes that are left before anything is allocated for it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from shared.errors import HeadraceError

MAX_HEADER_BYTES = 64 << 20
"""Vocabularies take up to 30 MB. The bound keeps what a hostile header can make us allocate to a few times this."""

_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")


class GGUFError(HeadraceError):
    """A GGUF file cannot be read or served: `field` is the metadata key, tensor or part of the header that is wrong."""

    def __init__(self, path: Path, field: str, problem: str) -> None:
        field = field[:120]
        super().__init__(f"{path}: {field} {problem}")
        self.path = path
        self.field = field
        self.problem = problem


class ByteReader:
    """A cursor over the header, at `position`; what does not fit or cannot be read is a `GGUFError`."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._end = min(size, MAX_HEADER_BYTES)
        self.position = 0

    @property
    def num_left(self) -> int:
        """Bytes that the header may still have."""
        return self._end - self.position

    def error(self, field: str, problem: str) -> GGUFError:
        """Make the error that names a field of this file."""
        return GGUFError(self._path, field, problem)

    def check_count(self, count: int, item_bytes: int, field: str) -> None:
        """Check that `count` items of at least this many bytes each can follow."""
        if count * item_bytes > self.num_left:
            raise self._too_long(field, f"names {count} items of at least {item_bytes} bytes")

    def take(self, num_bytes: int, field: str) -> bytes:
        """Return the next bytes."""
        if num_bytes > self.num_left:
            raise self._too_long(field, f"needs {num_bytes} bytes")
        try:
            content = self._file.read(num_bytes)
        except OSError as error:
            raise self.error(field, f"cannot be read ({error.strerror})") from None
        if len(content) < num_bytes:
            raise self.error(field, "was cut off while it was read; load again when the file is complete")
        self.position += num_bytes
        return content

    def uint32(self, field: str) -> int:
        """Read an unsigned number of 4 bytes."""
        value: int = _UINT32.unpack(self.take(4, field))[0]
        return value

    def uint64(self, field: str) -> int:
        """Read an unsigned number of 8 bytes."""
        value: int = _UINT64.unpack(self.take(8, field))[0]
        return value

    def text(self, field: str) -> str:
        """Read a string: its length in bytes, then UTF-8."""
        content = self.take(self.uint64(field), field)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self.error(field, f"holds a string that is not UTF-8: {content[:40]!r}") from None

    def _too_long(self, field: str, problem: str) -> GGUFError:
        limit = "the file ends" if self._end < MAX_HEADER_BYTES else f"the {MAX_HEADER_BYTES >> 20} MiB of a header end"
        return self.error(field, f"{problem} at byte {self.position}, but {limit} at byte {self._end}; copy it again")
