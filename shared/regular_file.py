"""Opening files whose paths, or whose folders, others have chosen."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

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
