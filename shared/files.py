"""Files and folders: written whole or not at all, opened where others chose the path, removed with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

WRITING = ".writing-"
"""The names of files that are being written begin so. One that a killed process left behind keeps such a name."""


def temporary_beside(target: Path) -> Path:
    """Return a new name in the directory of `target`."""
    return target.with_name(f"{WRITING}{secrets.token_hex(8)}")


class AtomicFile:
    """A file that is written beside its place, readable by its owner alone, and renamed by `commit`."""

    def __init__(self, target: Path) -> None:
        """Create the temporary file; the `OSError` if it cannot be names `target`."""
        self._target = target
        self._temporary = temporary_beside(target)
        try:
            self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            error.filename = str(target)
            raise
        self._is_open = True

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes; the `OSError` of a full disk names `target`."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            error.filename = str(self._target)
            raise

    def commit(self, *, syncs_directory: bool = True) -> None:
        """Sync the file and rename it; with `syncs_directory`, the name survives a loss of power too."""
        os.fsync(self._descriptor)
        self._close()
        self._temporary.replace(self._target)
        if not syncs_directory:
            return
        directory = os.open(self._target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def abort(self) -> None:
        """Delete the temporary file; does nothing after `commit`."""
        if self._is_open:
            self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        self._is_open = False
        os.close(self._descriptor)


_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular(path: Path) -> BufferedReader:
    """Open an ordinary file for reading.

    A pipe or a device is refused before anything waits for it, also if it has just taken the file's place.

    Raises:
        OSError: It cannot be opened, or is not an ordinary file.
    """
    fd = os.open(path, _FLAGS)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))


_UNLOCKED_S = 60.0
"""A process may have made its folder, and not have locked it yet."""


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A new folder, by default in the system's for temporary files; `prefix` is for folders of this class alone.

    A lock on the folder says that its process lives, or a child of it: the next process removes folders without a lock.
    """

    def __init__(self, prefix: str, directory: Path | None = None) -> None:
        """Make the folder, and remove those with this prefix beside it whose processes were killed."""
        _remove_abandoned(directory or Path(tempfile.gettempdir()), prefix)
        super().__init__(prefix=prefix, dir=directory)
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
