"""The time of day at a NATS server: deadlines are times of day that cross machines, whose own clocks may be wrong.

Gateways and workers read every time that crosses the wire from the clock of their NATS server, so that a machine whose
clock is an hour off, or is set while it runs, ends no request too early or too late.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
from collections.abc import Callable

from nats.aio.client import Client
from nats.errors import Error as NatsError

from shared.streams import INTERACTIVE_STREAM

# Requests with deadlines expire too early, or too late, by so much.
WARN_SKEW_S = 0.5
MOST_SKEW_S = 5.0
_TIMEOUT_S = 2.0
# Half of it is the error at most. A slower answer counts only as long as none was faster.
_MAX_ROUND_TRIP_S = 0.5
# How often a clock asks that has never had an answer: its own error may be hours.
_FIRST_TRIES = 3
SYNCHRONIZE_INTERVAL_S = 10.0


class ServerClock:
    """The time at the NATS server, as of the last time that it was asked; before that, this machine's."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()
        # Of the answer that it goes by.
        self._round_trip_s = math.inf

    def now(self) -> float:
        """Return the time in Unix seconds. It goes on evenly while this machine's clock is set."""
        return time.monotonic() + self._offset_s

    async def synchronize(self, client: Client) -> None:
        """Ask the server for the time; where it does not answer, the clock goes on as it was."""
        for _ in range(_FIRST_TRIES if self._round_trip_s == math.inf else 1):
            asked = time.monotonic()
            skew = await ask_skew(client, INTERACTIVE_STREAM, time.monotonic)
            round_trip_s = time.monotonic() - asked
            if skew is not None and round_trip_s < max(_MAX_ROUND_TRIP_S, self._round_trip_s):
                self._offset_s, self._round_trip_s = -skew, round_trip_s
                return


def skew_s(server_time: str, own_time: float) -> float | None:
    """Return by how many seconds our clock is ahead of a server's; None where it tells no time."""
    with contextlib.suppress(ValueError):
        # Python reads microseconds, NATS writes nanoseconds.
        head, _, fraction = server_time.rstrip("Z").partition(".")
        theirs = datetime.datetime.fromisoformat(f"{head}+00:00").timestamp() + float(f"0.{fraction or 0}")
        return own_time - theirs
    return None


def told_skew(skew: float) -> str:
    """Return a difference in words."""
    return f"{abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} NATS"


async def ask_skew(client: Client, stream: str, clock: Callable[[], float] | None = None) -> float | None:
    """Return by how many seconds `clock`, or this machine's, is ahead of NATS, which tells the time with a stream.

    None where it does not answer or say.
    """
    clock = clock or time.time
    asked = clock()
    try:
        reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=_TIMEOUT_S)
        return skew_s(str(json.loads(reply.data).get("ts", "")), (asked + clock()) / 2)
    except (NatsError, ValueError, AttributeError):
        return None
