"""Files that appear whole or not at all, also after a loss of power."""

from __future__ import annotations

import os
import secrets
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
        """Add bytes."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

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
