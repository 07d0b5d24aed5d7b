"""The receiver of a sequence's tokens, as the data path calls it.

The dispatcher gives each sequence one sink and calls it in order: `deliver` for each new delta, the last of which has
`finish`, or `fail` once instead. A sink never waits: it turns a delta into bytes, or keeps it.
"""

from __future__ import annotations

from typing import Protocol

from gateway.errors import ApiError
from shared.messages import Delta


class Sink(Protocol):
    """Receiver of one sequence."""

    def deliver(self, delta: Delta) -> None:
        """Take a piece. The last delta's `finish.reason` is `stop` or `length`."""

    def fail(self, error: ApiError) -> None:
        """Learn that the sequence ended otherwise; nothing follows."""
