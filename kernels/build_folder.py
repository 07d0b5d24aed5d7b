"""The cache folder while kernels are compiled in it: who builds, where, and what killed builds have left there.

Owns no state but the locks that it holds on folders. A lock ends with its process, however that ends and whichever
process gets its number next, so a build that is locked is alive. On a file system without locks nobody waits, each
builds in a folder of its own, and nothing that others have left is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# What the folders in which libraries are compiled begin with.
_PREFIX = "build-"


@contextmanager
def lock(directory: Path) -> Iterator[bool]:
    """Try to lock a folder without waiting, and yield whether it is locked.

    Raises:
        BlockingIOError: Another process has locked it, or another holder in this one.
        OSError: The folder cannot be opened.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        yield _is_locked(handle)
    finally:
        os.close(handle)


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        # Some file systems have no locks.
        return False
    return True


@contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """Make a folder to compile in, and remove it in the end; while it is locked, nobody else removes it."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=_PREFIX) as name, lock(Path(name)):
        yield Path(name)


def tidy(directory: Path) -> None:
    """Remove what killed builds have left in the cache folder, unless somebody builds there now."""
    with suppress(OSError), lock(directory) as is_locked:
        if is_locked:
            remove_abandoned(directory)


def remove_abandoned(directory: Path) -> None:
    """Remove the folders of builds whose processes were killed.

    Only for who has locked the cache folder: between making its folder and locking it, a build looks abandoned.
    """
    for left in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError), lock(left) as is_locked:
            if is_locked:
                shutil.rmtree(left, ignore_errors=True)
