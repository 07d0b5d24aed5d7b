"""An open GGUF file: header, metadata, and the raw rows of its tensors.

The file is untrusted. Opening it checks every count, size, type and offset against the file; a wrong one raises a
`GGUFError` before anything is allocated for it. The file is read, not mapped: one that shrinks meanwhile is an
error and not the end of the process. Source: GGUF's specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gpu_worker.quantization.gguf.byte_reader import ByteReader, GGUFError
from gpu_worker.quantization.gguf.metadata import Metadata, read_metadata
from gpu_worker.quantization.gguf.tensor_types import TENSOR_TYPES, TensorType, type_name

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 16
# The largest models have some thousands. An object costs us many times the bytes that a hostile file spends on it.
_MAX_TENSORS = 65_536
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it is; its shape begins with the outermost dimension, rows are the innermost."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int
    num_bytes: int


class GGUFFile:
    """An open file, a context manager. One thread reads: the file has one position."""

    def __init__(self, path: Path) -> None:
        """Open and check a file; `GGUFError` if it cannot be read or is malformed."""
        self.path = path
        self._file = _open(path)
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            reader = ByteReader(path, self._file, self._size)
            num_tensors, num_fields = _read_header(reader)
            self.metadata: Metadata = read_metadata(path, reader, num_fields)
            self.tensors: Mapping[str, TensorInfo] = self._read_tensors(reader, num_tensors)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; its metadata stay."""
        self._file.close()

    def rows(self, info: TensorInfo, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Read rows as they are stored, `[count, row_bytes]`; `GGUFError` if the file ends early."""
        return self.part(info, range(first, first + count), range(info.row_bytes))

    def part(self, info: TensorInfo, rows: range, columns: range) -> npt.NDArray[np.uint8]:
        """Read some bytes of some rows, `[len(rows), len(columns)]`; `GGUFError` if the file ends early."""
        assert 0 <= rows.start <= rows.stop <= info.num_bytes // info.row_bytes
        stored = np.empty((len(rows), len(columns)), np.uint8)
        first = info.offset + rows.start * info.row_bytes + columns.start
        runs = [stored.reshape(-1)] if len(columns) == info.row_bytes else stored
        for number, run in enumerate(runs):
            self._read_exactly(info, first + number * info.row_bytes, run.data)
        return stored

    def _read_exactly(self, info: TensorInfo, offset: int, target: memoryview) -> None:
        while target:
            try:
                # Not through the file's buffer, which would read more than is asked for.
                count = os.preadv(self._file.fileno(), [target], offset)
            except OSError as error:
                raise GGUFError(self.path, f"tensor {info.name!r}", f"cannot be read ({error.strerror})") from None
            if count == 0:
                problem = "was cut off while it was read; load again when the file is complete"
                raise GGUFError(self.path, f"tensor {info.name!r}", problem)
            target, offset = target[count:], offset + count

    def _read_tensors(self, reader: ByteReader, count: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.integer("general.alignment", 32, minimum=8, maximum=_MAX_ALIGNMENT)
        if alignment & (alignment - 1):
            raise self.metadata.error("general.alignment", f"is {alignment}; it must be a power of two")
        if count > _MAX_TENSORS:
            raise reader.error("the number of tensors", f"is {count}; at most {_MAX_TENSORS} are read")
        entries = [_read_entry(reader, index) for index in range(count)]
        begin = -(-reader.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for entry in entries:
            if entry.name in tensors:
                raise reader.error(f"tensor {entry.name!r}", "occurs twice")
            tensors[entry.name] = self._located(entry, begin, alignment)
        self._check_disjoint(tensors)
        return tensors

    def _located(self, entry: _Entry, begin: int, alignment: int) -> TensorInfo:
        """Check an entry against the size of the file; `begin` is where the data of all tensors begins."""
        field = f"tensor {entry.name!r}"
        kind = TENSOR_TYPES.get(entry.type_number)
        if kind is None:
            supported = ", ".join(item.name for item in TENSOR_TYPES.values())
            raise GGUFError(self.path, field, f"has type {type_name(entry.type_number)}; supported: {supported}")
        columns = entry.dimensions[0]
        if columns % kind.block_size:
            problem = f"has {columns} columns; {kind.name} needs a multiple of {kind.block_size}"
            raise GGUFError(self.path, field, problem)
        row_bytes = columns // kind.block_size * kind.block_bytes
        num_bytes = row_bytes
        for dimension in entry.dimensions[1:]:
            num_bytes *= dimension
        if entry.offset % alignment:
            raise GGUFError(self.path, field, f"has offset {entry.offset}, no multiple of the alignment, {alignment}")
        end = begin + entry.offset + num_bytes
        if end > self._size:
            problem = f"ends at byte {end}, but the file has {self._size}; copy it again"
            raise GGUFError(self.path, field, problem)
        return TensorInfo(entry.name, kind, entry.dimensions[::-1], begin + entry.offset, row_bytes, num_bytes)

    def _check_disjoint(self, tensors: Mapping[str, TensorInfo]) -> None:
        end, before = 0, ""
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise GGUFError(self.path, f"tensor {info.name!r}", f"overlaps tensor {before!r}")
            end, before = info.offset + info.num_bytes, info.name


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the file lists it: innermost dimension first, offset from where the data begins."""

    name: str
    dimensions: tuple[int, ...]
    type_number: int
    offset: int


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise GGUFError(path, "the file", f"cannot be read ({error.strerror})") from None


def _read_header(reader: ByteReader) -> tuple[int, int]:
    magic = reader.take(4, "the magic number")
    if magic != _MAGIC:
        raise reader.error("the magic number", f"is {magic!r}; a GGUF file begins with {_MAGIC!r}")
    version = reader.uint32("the version")
    if version not in _VERSIONS:
        is_swapped = version and int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        found = "of a big-endian file" if is_swapped else str(version)
        raise reader.error("the version", f"is {found}; supported: 2 and 3, little-endian; convert the model again")
    return reader.uint64("the number of tensors"), reader.uint64("the number of metadata fields")


def _read_entry(reader: ByteReader, index: int) -> _Entry:
    name = reader.text(f"the name of tensor {index}")
    field = f"tensor {name[:80]!r}"
    if not _TENSOR_NAME.fullmatch(name):
        raise reader.error(field, "has a name that is not 1 to 64 letters, digits, dots, dashes and underscores")
    num_dimensions = reader.uint32(field)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.error(field, f"has {num_dimensions} dimensions; supported: 1 to {_MAX_DIMENSIONS}")
    dimensions = tuple(reader.uint64(field) for _ in range(num_dimensions))
    if 0 in dimensions:
        raise reader.error(field, f"has dimensions {list(dimensions)}; each must be at least 1")
    return _Entry(name, dimensions, reader.uint32(field), reader.uint64(field))
