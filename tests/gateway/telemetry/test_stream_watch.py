"""What a real NATS says of its streams and of usage, and what is known where it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from nats.errors import Error as NatsError
from nats.js.api import StreamConfig

from gateway.telemetry import stream_watch
from gateway.telemetry.stream_watch import STREAMS, USAGE_ROWS, StreamState, StreamWatch, UsageWatch
from shared.nats_connection import connect
from shared.streams import DEAD_STREAM, RESULTS_STREAM
from shared.usage_ledger import UsageTotal
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


async def test_usage_is_shown_by_all_its_labels_and_outlives_an_absence_of_nats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[list[UsageTotal]] = []
    num_asked = 0
    is_wanted = False

    async def read_usage(js: object, limit: int) -> AsyncIterator[UsageTotal]:
        nonlocal num_asked
        num_asked += 1
        if not answers:
            raise NatsError
        for total in answers.pop():
            yield total

    monkeypatch.setattr(stream_watch, "_USAGE_INTERVAL_S", 0.001)
    monkeypatch.setattr(stream_watch, "read_usage", read_usage)
    watch = UsageWatch(None, lambda: is_wanted)  # type: ignore[arg-type]
    watching = asyncio.create_task(watch.watch_forever())
    # Another process asks.
    await asyncio.sleep(0.02)
    assert num_asked == 0
    answers.append([UsageTotal("t", "m", "batch", measure, place) for place, measure in enumerate(USAGE_ROWS)])
    is_wanted = True
    await until(lambda: num_asked > 2)
    assert not watching.done()
    watching.cancel()
    samples = [sample for family in watch.collect() for sample in family.samples]
    labels = {"model": "m", "tenant": "t", "lane": "batch"}
    assert [(sample.name, sample.labels, sample.value) for sample in samples] == [
        (row.name, labels, place) for place, row in enumerate(USAGE_ROWS.values())
    ]
