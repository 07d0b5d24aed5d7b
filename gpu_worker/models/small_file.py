"""The small files of a model's directory. They are untrusted: no more is read of one than such a file has."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

MAX_BYTES = 64 << 20
"""Vocabularies take up to 35 MB."""


def read_small_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: It cannot be read, is larger than `max_bytes`, or no file at all, such as a device without end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB, which no such file is", str(path))
    return content


def is_inside(path: Path, directory: Path) -> bool:
    """Return True if a file really lies in a model's directory, or where the hub's library keeps what that links to."""
    root = directory.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    return any(path.resolve().is_relative_to(each) for each in roots)
