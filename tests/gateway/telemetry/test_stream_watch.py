"""What a real NATS says of its streams, and what is known where it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from nats.js.api import StreamConfig

from gateway.telemetry import stream_watch
from gateway.telemetry.stream_watch import STREAMS, StreamState, StreamWatch
from shared.nats_connection import connect
from shared.streams import DEAD_STREAM, RESULTS_STREAM
from tests.gateway.wire_worker import until
from tests.servers import NatsServer


async def test_streams_that_are_there_are_shown_while_they_are_wanted(
    start_nats: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_watch, "INTERVAL_S", 0.01)
    server = start_nats()
    nats = await connect(server.url, role="gateway", name="g")
    js = nats.jetstream()
    # Neither the first nor the last of those that are asked for.
    assert STREAMS[1:3] == (DEAD_STREAM, RESULTS_STREAM)
    for name in STREAMS[1:3]:
        await js.add_stream(StreamConfig(name=name, subjects=[f"t.{name}"]))
    await js.publish(f"t.{DEAD_STREAM}", b"x" * 100)
    is_wanted = True
    watch = StreamWatch(js, lambda: is_wanted)
    assert watch.states == {}
    watching = asyncio.create_task(watch.watch_forever())
    await until(lambda: bool(watch.states))
    dead = watch.states[DEAD_STREAM]
    assert dead.messages == 1
    assert dead.size_bytes > 100
    assert watch.states == {DEAD_STREAM: dead, RESULTS_STREAM: StreamState(0, 0)}
    is_wanted = False
    await until(lambda: watch.states == {})
    is_wanted = True
    await until(lambda: bool(watch.states))
    await nats.close()
    await until(lambda: watch.states == {})
    assert not watching.done()
    watching.cancel()
