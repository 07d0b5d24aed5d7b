"""Event streams on an exchange whose client reads, pauses, resumes, or never reads: no byte lost, doubled or kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http1.exchange import Exchange
from gateway.streams import event_stream
from gateway.streams.dialect import OPENAI, server_sent_event
from gateway.streams.event_stream import MAX_DELAY_S, EventStream, EventStreamLimits, Flusher
from gateway.streams.numbered import NumberedEventStream
from tests.gateway.wire_worker import until

DONE = OPENAI.end_of_stream
LIMITS = EventStreamLimits(buffer_bytes=100, send_timeout_s=5.0)


class RecordingExchange:
    """What a stream needs of an exchange; keeps what was written."""

    def __init__(self) -> None:
        self.written = b""
        self.started = self.closed = self.finished = False
        self.paused_since: float | None = None
        self.on_writable: Callable[[], None] | None = None

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        assert (status, self.started) == (200, False)
        self.started = True

    def write(self, body: bytes) -> None:
        assert self.started
        assert not self.closed
        self.written += body

    def finish(self, body: bytes = b"") -> None:
        self.write(body)
        self.closed = self.finished = True

    def finish_and_close(self, body: bytes) -> None:
        self.finish(body)

    def resume(self) -> None:
        self.paused_since = None
        assert self.on_writable is not None
        self.on_writable()


class FlushAtOnce:
    def add(self, stream: EventStream) -> None:
        """The tests flush themselves."""


def stream_on(exchange: RecordingExchange, on_cut: Callable[[], None] | None = None) -> EventStream:
    flusher = cast("Flusher", FlushAtOnce())
    return EventStream(cast("Exchange", exchange), flusher, LIMITS, lambda: (), 0.0, OPENAI, on_cut)


def test_bytes_held_while_the_client_pauses_are_written_when_it_resumes_and_once() -> None:
    exchange = RecordingExchange()
    stream = stream_on(exchange)
    stream.send_now(b"one ")
    exchange.paused_since = 1.0
    stream.send_now(b"two ")
    stream.send_now(b"three ")
    assert exchange.written == b"one "
    exchange.resume()
    assert exchange.written == b"one two three "
    exchange.resume()
    stream.end(b"last ")
    assert exchange.written == b"one two three last " + DONE


def test_bytes_held_at_the_end_are_written_before_the_end() -> None:
    exchange = RecordingExchange()
    stream = stream_on(exchange)
    stream.send_now(b"one ")
    exchange.paused_since = 1.0
    stream.send_now(b"two ")
    stream.send(b"three ")
    stream.end(b"last ")
    assert exchange.written == b"one two three last " + DONE
    assert exchange.finished


def test_stream_that_ends_with_its_first_bytes_is_whole() -> None:
    exchange = RecordingExchange()
    stream_on(exchange).end(b"only ")
    assert exchange.written == b"only " + DONE
    assert exchange.finished


def test_what_was_held_before_does_not_count_once_it_is_written() -> None:
    exchange = RecordingExchange()
    stream = stream_on(exchange)
    stream.send_now(b"begin ")
    for _ in range(10):
        exchange.paused_since = 1.0
        stream.send_now(b"x" * 60)
        exchange.resume()
    assert not exchange.closed
    assert exchange.written == b"begin " + b"x" * 600


def test_stream_that_has_written_is_kept_alive_in_each_silence_after_it() -> None:
    exchange, now, silence_s = RecordingExchange(), 0.0, LIMITS.keep_alive_s
    stream = stream_on(exchange)
    for _ in range(3):
        stream.send_now(b"text ")
        exchange.written = b""
        now += 1.0
        stream.tick(now)
        stream.tick(now + silence_s - 0.1)
        assert exchange.written == b""
        stream.tick(now + silence_s + 0.1)
        assert exchange.written == OPENAI.keep_alive
        now += silence_s + 0.1


def test_client_with_too_much_unread_is_cut_and_told() -> None:
    exchange = RecordingExchange()
    cuts: list[int] = []
    stream = stream_on(exchange, lambda: cuts.append(1))
    stream.send_now(b"begin ")
    exchange.paused_since = 1.0
    stream.send_now(b"x" * 60)
    assert not exchange.closed
    stream.send_now(b"x" * 60)
    assert exchange.finished
    assert cuts == [1]
    assert exchange.written.startswith(b'begin data: {"error"')
    assert exchange.written.endswith(DONE)
    # What is over is not cut once more.
    stream.tick(100.0)
    assert cuts == [1]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("say"), st.integers(1, 9)), st.sampled_from([("flush", 0), ("pause", 0), ("resume", 0)])
        ),
        max_size=40,
    )
)
def test_whatever_happens_the_client_reads_everything_in_order(actions: list[tuple[str, int]]) -> None:
    exchange = RecordingExchange()
    stream = stream_on(exchange)
    # Without output there is nothing that begins an answer.
    stream.flush()
    assert not exchange.started
    said = b"first "
    stream.send_now(said)
    num_said = 0
    for action, size in actions:
        if action == "say":
            piece = b"%d" % (num_said % 10) * size
            num_said += 1
            said += piece
            stream.send(piece)
        elif action == "flush":
            stream.flush()
        elif action == "pause":
            exchange.paused_since = 1.0
        elif exchange.paused_since is not None:
            exchange.resume()
        if exchange.closed:
            # Too much was held; that it is told is tested elsewhere.
            assert len(said) > LIMITS.buffer_bytes
            return
    stream.end()
    assert exchange.written == said + DONE


async def test_stream_that_breaks_does_not_cost_its_neighbours_their_flush(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def flush(self) -> None:
            raise RuntimeError("broken stream")

    flusher = Flusher(asyncio.get_running_loop())
    exchanges = [RecordingExchange() for _ in range(2)]
    streams = [EventStream(cast("Any", exchange), flusher, LIMITS, lambda: (), 0.0) for exchange in exchanges]
    streams[0].send(b"one ")
    flusher.add(Broken())
    streams[1].send(b"two ")
    await until(lambda: all(exchange.written for exchange in exchanges))
    assert [exchange.written for exchange in exchanges] == [b"one ", b"two "]
    assert "could not be flushed" in caplog.text
    numbered = NumberedEventStream(
        cast("Exchange", exchanges[1]), flusher, LIMITS, lambda: (), 0.0, OPENAI, lambda: None, 0, lambda error: None
    )
    numbered.send(b"data: x\n\ndata: y\n\n")
    await until(lambda: exchanges[1].written == b"two id: 0\ndata: x\n\nid: 1\ndata: y\n\n")
    numbered.send_event(b"data: z\n\n")
    await until(lambda: exchanges[1].written.endswith(b"id: 2\ndata: z\n\n"))
    # Nor the next one.
    streams[0].send(b"more ")
    await until(lambda: exchanges[0].written == b"one more ")


LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\\\u2028"


@pytest.mark.parametrize("name", ["", "response.created"])
def test_event_has_no_more_lines_than_its_fields_for_any_client(name: str) -> None:
    event = server_sent_event(msgspec.json.encode({"text": LINE_ENDS}), name)
    *names, data, end = event.decode().splitlines()
    assert (names, end) == ([f"event: {name}"] if name else [], "")
    assert json.loads(data.removeprefix("data: ")) == {"text": LINE_ENDS}


class Stream:
    num_flushes = 0

    def flush(self) -> None:
        self.num_flushes += 1


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


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5), first_event=st.integers(0, 6))
def test_events_that_are_sent_together_are_numbered_and_left_out_one_by_one(sizes: list[int], first_event: int) -> None:
    exchange = RecordingExchange()
    stream = NumberedEventStream(
        cast("Exchange", exchange), cast("Flusher", FlushAtOnce()), LIMITS, lambda: (), 0.0, OPENAI, lambda: None,
        first_event, lambda error: None,
    )  # fmt: skip
    exchange.started = True
    events = [b"data: %d\n\n" % number for number in range(sum(sizes))]
    rest = list(events)
    for size in sizes:
        if size == 1:
            stream.send_event(rest[0])
        else:
            stream.send(b"".join(rest[:size]))
        del rest[:size]
    stream.has_ids = first_event < 6
    stream.end()
    told = [*events, DONE]
    numbered = [b"id: %d\n%b" % (number, event) for number, event in enumerate(told)]
    # An end about this connection alone is no event of the answer.
    expected = numbered[first_event:] if stream.has_ids else [*numbered[first_event:-1], DONE]
    assert exchange.written == b"".join(expected)
