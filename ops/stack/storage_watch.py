"""A NATS server that goes on refusing to store after its disk has room again, and is to be started anew.

A block file that could not be written once stays unwritable for nats-server until it is opened anew, however much room
there is by then: every publish to that stream fails with the old error. So when the server still complains of a full
disk after there was room for a whole round, it is replaced. What it acknowledged is on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

ROUND_S = 2.0
ROOM_BYTES = 32 << 20
"""So much must be free. A restart for less would be followed by the next full disk."""

_COMPLAINT = b"no space left on device"


class StorageWatch:
    """Listens to what a NATS server logs."""

    def __init__(self, directory: Path, replace: Callable[[], None]) -> None:
        self._directory = directory
        self._replace = replace
        self._has_complained = False
        self._had_room = False

    def note_line(self, line: bytes) -> None:
        """Take in a line that the server logged."""
        self._has_complained = self._has_complained or _COMPLAINT in line

    def note_round(self, free_bytes: int) -> bool:
        """Take in how much is free at the end of a round; return whether the server complained for no reason."""
        has_room = free_bytes >= ROOM_BYTES
        is_wrong = self._has_complained and self._had_room and has_room
        # A server that was just replaced has a round to complain of what it finds.
        self._had_room = has_room and not is_wrong
        self._has_complained = False
        return is_wrong

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            await asyncio.sleep(ROUND_S)
            # Somebody may delete the directory of a running system, which serves people all the same.
            with contextlib.suppress(FileNotFoundError):
                if self.note_round(shutil.disk_usage(self._directory).free):
                    self._replace()
