"""How full the streams in NATS are, asked every few seconds by the gateway that shows the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from gateway.telemetry.row import MetricRow
from shared.streams import DEAD_STREAM, INTERACTIVE_STREAM, RESPONSES_STREAM, RESULTS_STREAM

INTERVAL_S = 5.0
STREAMS = (INTERACTIVE_STREAM, DEAD_STREAM, RESULTS_STREAM, RESPONSES_STREAM)
_STREAM = ("stream",)
STREAM_ROWS = {
    "messages": MetricRow(
        "headrace_stream_messages", "gauge", _STREAM, "Messages in a stream of NATS; HR_DEAD holds the dead letters."
    ),
    "size_bytes": MetricRow("headrace_stream_bytes", "gauge", _STREAM, "Bytes in a stream of NATS."),
}


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream holds."""

    messages: int
    size_bytes: int


class StreamWatch:
    """Asks NATS.

    Attributes:
        states: The last answers, by name; a stream that does not answer is not there.
    """

    def __init__(self, js: JetStreamContext, is_wanted: Callable[[], bool]) -> None:
        self._js = js
        self._is_wanted = is_wanted
        self.states: dict[str, StreamState] = {}

    async def watch_forever(self) -> None:
        """Ask every few seconds."""
        while True:
            self.states = await self._ask() if self._is_wanted() else {}
            await asyncio.sleep(INTERVAL_S)

    async def _ask(self) -> dict[str, StreamState]:
        states = {}
        for name in STREAMS:
            try:
                state = (await self._js.stream_info(name)).state
            except (NatsError, OSError):
                # Missing, or NATS is away, which has metrics of its own.
                continue
            states[name] = StreamState(state.messages, state.bytes)
        return states
