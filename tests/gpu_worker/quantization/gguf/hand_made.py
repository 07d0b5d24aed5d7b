"""GGUF files put together byte by byte, so that any of them can lie."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def field(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(name: str | bytes, dimensions: Sequence[int] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file(
    fields: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_fields: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Put a file together; counts that are given replace the true ones."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
