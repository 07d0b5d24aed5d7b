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

# What the folders in which libraries are compiled begin with. Nobody else's do: the cache folder may be one in which
# others keep what they have built.
_PREFIX = "cpu-kernels-build-"


@contextmanager
def lock(directory: Path) -> Iterator[bool]:
    """Try to lock a folder without waiting, and yield whether it is locked.

    Raises:
        BlockingIOError: Another process has locked it, or another holder in this one.
        OSError: The folder cannot be opened.
    """
    with _opened(directory, os.O_DIRECTORY) as handle:
        yield _is_locked(handle)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | flags)
    try:
        yield handle
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
    """Make a folder to compile in, and remove it in the end; while it is locked, no other process removes it."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=_PREFIX) as name, lock(Path(name)):
        yield Path(name)


def tidy(directory: Path) -> None:
    """Remove what killed builds have left in the cache folder, unless somebody builds there now."""
    with suppress(OSError), lock(directory) as is_locked:
        if is_locked:
            remove_abandoned(directory)


def remove_abandoned(directory: Path) -> None:
    """Remove the folders of builds of this user whose processes were killed.

    Only for who has locked the cache folder: between making its folder and locking it, a build looks abandoned.
    """
    for left in directory.glob(f"{_PREFIX}*"):
        # A folder and nothing that leads elsewhere: opening a pipe would wait for whoever writes into it.
        with suppress(OSError), _opened(left, os.O_DIRECTORY | os.O_NOFOLLOW) as handle:
            if os.fstat(handle).st_uid == os.geteuid() and _is_locked(handle):
                shutil.rmtree(left, ignore_errors=True)
