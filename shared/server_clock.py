"""The time of day at a NATS server beside our own: deadlines of requests are times of day, and clocks may be wrong."""

from __future__ import annotations

import contextlib
import datetime
import json
import time

from nats.aio.client import Client
from nats.errors import Error as NatsError

# Requests with deadlines expire too early, or too late, by so much.
WARN_SKEW_S = 0.5
MOST_SKEW_S = 5.0
_TIMEOUT_S = 2.0


def skew_s(server_time: str, own_time: float) -> float | None:
    """Return by how many seconds our clock is ahead of a server's; None where it tells no time.

    Args:
        server_time: As NATS writes it, in UTC with nanoseconds.
        own_time: Unix seconds.
    """
    with contextlib.suppress(ValueError):
        # Python reads microseconds, NATS writes nanoseconds.
        head, _, fraction = server_time.rstrip("Z").partition(".")
        theirs = datetime.datetime.fromisoformat(f"{head}+00:00").timestamp() + float(f"0.{fraction or 0}")
        return own_time - theirs
    return None


def told_skew(skew: float) -> str:
    """Return a difference in words."""
    return f"{abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} NATS"


async def ask_skew(client: Client, stream: str) -> float | None:
    """Ask NATS for the time, which it tells with what it knows of a stream; None where it does not say."""
    asked = time.time()
    try:
        reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=_TIMEOUT_S)
        return skew_s(str(json.loads(reply.data).get("ts", "")), (asked + time.time()) / 2)
    except (NatsError, ValueError, AttributeError):
        return None
