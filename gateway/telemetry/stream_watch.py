"""The size of the streams in NATS, and the usage of tenants kept there, for the gateway that shows the fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from prometheus_client.core import Metric

from gateway.telemetry.row import MetricRow, add
from shared.streams import DEAD_STREAM, INTERACTIVE_STREAM, RESPONSES_STREAM, RESULTS_STREAM
from shared.usage_ledger import UsageTotal, read_usage

INTERVAL_S = 5.0
STREAMS = (INTERACTIVE_STREAM, DEAD_STREAM, RESULTS_STREAM, RESPONSES_STREAM)
_STREAM = ("stream",)
STREAM_ROWS = {
    "messages": MetricRow(
        "headrace_stream_messages", "gauge", _STREAM, "Messages in a stream of NATS; HR_DEAD holds the dead letters."
    ),
    "size_bytes": MetricRow("headrace_stream_bytes", "gauge", _STREAM, "Bytes in a stream of NATS."),
}


class StreamState(NamedTuple):
    """What a stream holds."""

    messages: int
    size_bytes: int


class StreamWatch:
    """Asks NATS."""

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


_USAGE_INTERVAL_S = 15.0
# A scrape and a round of questions stay small: 256 tenants with a model and a lane each.
MAX_TOTALS = 1024
_LABELS = ("model", "tenant", "lane")
_OF = "of a tenant by lane since the system was set up; kept by NATS, so that it outlives every process."
USAGE_ROWS = {
    "requests": MetricRow("headrace_usage_requests_total", "counter", _LABELS, f"Answers {_OF}"),
    "prompt_tokens": MetricRow("headrace_usage_prompt_tokens_total", "counter", _LABELS, f"Prompt tokens {_OF}"),
    "cached_tokens": MetricRow(
        "headrace_usage_cached_tokens_total", "counter", _LABELS, f"Prompt tokens from the prefix cache {_OF}"
    ),
    "completion_tokens": MetricRow(
        "headrace_usage_completion_tokens_total", "counter", _LABELS, f"Generated tokens {_OF}"
    ),
}


class UsageWatch:
    """Asks NATS."""

    def __init__(self, js: JetStreamContext, is_wanted: Callable[[], bool]) -> None:
        self._js = js
        self._is_wanted = is_wanted
        self._totals: list[UsageTotal] = []

    async def watch_forever(self) -> None:
        """Ask from time to time."""
        while True:
            if self._is_wanted():
                # While NATS is away, or has no such stream, the last totals are still true.
                with contextlib.suppress(NatsError, OSError):
                    self._totals = [total async for total in read_usage(self._js, MAX_TOTALS)]
            await asyncio.sleep(_USAGE_INTERVAL_S)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        for measure, row in USAGE_ROWS.items():
            family = row.family()
            for each in self._totals:
                if each.measure == measure:
                    add(family, [each.model, each.tenant, each.lane], each.total)
            yield family
