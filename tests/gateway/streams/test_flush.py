from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from gateway.streams import event_stream
from gateway.streams.event_stream import MAX_DELAY_S, Flusher
from tests.gateway.wire_worker import until


class Stream:
    def __init__(self, *, is_broken: bool = False) -> None:
        self.num_flushes = 0
        self.is_broken = is_broken

    def flush(self) -> None:
        self.num_flushes += 1
        if self.is_broken:
            raise RuntimeError("this stream is broken")


class Clock:
    """A clock and an event loop that a test drives by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.delays: list[float] = []
        self._callbacks: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.call_later(0.0, callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        self.delays.append(delay)
        self._callbacks.append(callback)

    def run(self) -> None:
        self.now += self.delays[-1]
        self._callbacks.pop()()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(event_stream, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("took_s", "delay_s"),
    [(0.03, 0.03), pytest.param(2.0, MAX_DELAY_S, id="process was paused")],
)
def test_next_flush_waits_as_long_as_the_last_one_took_and_not_as_long_as_a_pause(
    clock: Clock, took_s: float, delay_s: float
) -> None:
    flusher = Flusher(cast("asyncio.AbstractEventLoop", clock))

    class SlowStream(Stream):
        def flush(self) -> None:
            super().flush()
            clock.now += took_s

    slow, streams = SlowStream(), [Stream(), Stream()]
    flusher.add(slow)
    clock.run()
    for stream in streams:
        flusher.add(stream)
    assert clock.delays == [0.0, pytest.approx(delay_s)]
    clock.run()
    assert [stream.num_flushes for stream in (slow, *streams)] == [1, 1, 1]
    # These took no time.
    flusher.add(slow)
    assert clock.delays[2:] == [0.0]


async def test_one_streams_exception_loses_no_neighbours_flush() -> None:
    flusher = Flusher(asyncio.get_running_loop())
    streams = [Stream(), Stream(is_broken=True), Stream()]

    async def flush_all(num_flushes: int) -> None:
        for stream in streams:
            flusher.add(stream)
        await until(lambda: [stream.num_flushes for stream in streams] == [num_flushes] * 3)

    await flush_all(1)
    await flush_all(2)
