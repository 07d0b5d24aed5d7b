"""Fetches a model's files from the disk while libraries are imported and ranks start: a disk should never wait.

Nothing is kept here: the system's page cache is filled, from which `models.tensor_reader` then reads.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from gpu_worker.layers.free_memory import free_host_bytes

_WINDOW_BYTES = 64 << 20
_NUM_WINDOWS = 4
# Files and the weights made of them are in memory at once. Without room, pages fetched early are dropped unread.
_SHARE_OF_FREE = 0.4


def read_ahead(model: Path) -> None:
    """Begin to fetch the weights of a model, a folder or a file, in a thread of its own, if memory has room for them.

    A file that cannot be read is left to the loader, whose error says more.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    # A pipe would wait for a writer.
    files = [file for file in files if file.is_file()]
    try:
        total = sum(file.stat().st_size for file in files)
    except OSError:
        return
    if total <= _SHARE_OF_FREE * free_host_bytes():
        threading.Thread(target=_fetch, args=(files,), name="read-ahead", daemon=True).start()


def _fetch(files: list[Path]) -> None:
    try:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                _fetch_file(opened.fileno())
    except OSError:
        return


def _fetch_file(fd: int) -> None:
    """Ask for a window while some before it arrive, as fast as the disk is."""
    for start in range(0, os.fstat(fd).st_size, _WINDOW_BYTES):
        os.posix_fadvise(fd, start, _WINDOW_BYTES, os.POSIX_FADV_WILLNEED)
        os.pread(fd, 1, max(0, start - _NUM_WINDOWS * _WINDOW_BYTES))
