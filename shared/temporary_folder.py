"""A folder for temporary files that goes with its process, however that ends: the next process removes the leftovers.

A lock on the folder says that its process lives, or a child of it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_UNLOCKED_S = 60.0
"""A process may have made its folder, and not have locked it yet."""


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A new folder in the system's folder for temporary files; `prefix` is for folders of this class alone."""

    def __init__(self, prefix: str) -> None:
        """Make the folder, and remove those with this prefix whose processes were killed."""
        _remove_abandoned(Path(tempfile.gettempdir()), prefix)
        super().__init__(prefix=prefix)
        self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def cleanup(self) -> None:
        """Remove the folder."""
        super().cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(directory: Path, prefix: str) -> None:
    for left in directory.glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_if_abandoned(left)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder of this user that no process has locked; `OSError` if one has, or it cannot be locked."""
    # A link is another user's way to have something else removed, and opening a pipe would wait for its writer.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(handle)
        if state.st_uid == os.geteuid() and time.time() - state.st_mtime > _UNLOCKED_S:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(handle)
