"""What a gateway process and its parent know of each other: the process's state, over a pipe, and the parent's death.

The process writes one byte, its state, four times a second from its event loop. So the parent sees a process whose loop
stands still, for whatever reason, and knows which ones serve. The process sees its parent's death by the end of
another pipe, whose only writer is the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
from dataclasses import dataclass

BEAT_INTERVAL_S = 0.25


class ProcessState(enum.Enum):
    """What a gateway process is doing; the values are what goes through the pipe."""

    STARTING = b"s"
    SERVING = b"r"
    DRAINING = b"d"


@dataclass(slots=True)
class ParentLink:
    """The process's end.

    Attributes:
        socket_index: Which of the public port's sockets is its own.
        parent_pipe: Readable once the parent is dead.
        state_pipe: Takes the beats.
    """

    socket_index: int
    parent_pipe: int
    state_pipe: int
    state: ProcessState = ProcessState.STARTING

    def enter(self, state: ProcessState) -> None:
        """Take up a state, and tell the parent at once."""
        self.state = state
        self.beat()

    def beat(self) -> None:
        """Tell the parent that the event loop runs. A parent that does not read, or is dead, is no reason to stop."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.state_pipe, self.state.value)

    async def beat_forever(self) -> None:
        """Beat four times a second."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_INTERVAL_S)
