"""The log file of one child, bounded in size."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from io import FileIO
from pathlib import Path

MAX_LOG_BYTES = 16 << 20
_MAX_LINE_BYTES = 64 << 10


class ChildLog:
    """Appends lines to a file; when it is full, the file becomes `<name>.1` and a new one begins."""

    def __init__(self, path: Path) -> None:
        """Open the file, keeping what earlier runs wrote.

        A child runs without one where that fails: its folder was deleted meanwhile, or the disk is full.
        """
        self._path = path
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = self._opened()

    async def read_from(self, stream: asyncio.StreamReader, on_line: Callable[[bytes], None]) -> None:
        """Copy the stream to the file until it ends, and call `on_line` with each line, without its newline."""
        rest = b""
        while data := await stream.read(_MAX_LINE_BYTES):
            self._write(data)
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                on_line(line)
        if rest:
            on_line(rest)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> None:
        # A child goes on while the disk is full: its lines are lost, and it is not held up by a pipe that nobody reads.
        with contextlib.suppress(OSError):
            self._append(data)

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._opened()
        if self._file.tell() + len(data) > MAX_LOG_BYTES:
            self._file.close()
            self._file = None
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._opened()
        self._file.write(data)

    def _opened(self) -> FileIO:
        return self._path.open("ab", buffering=0)
