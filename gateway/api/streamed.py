"""Streamed answers: each choice is a sink that turns deltas into events of one event stream."""

from __future__ import annotations

from gateway.api.answer import Answer, EventAnswer, ResponseHead
from gateway.api.choice_fields import context_fields, finish_reason, new_call_id
from gateway.api.chunks import AnswerIdentity, ChoiceChunks, encode_json, encode_text, usage_event
from gateway.api.details import ChoiceDetails, DetailedSink
from gateway.api.read_choice import ReadChoice
from gateway.api.usage import usage_fields
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.generation import Generation, OutputReading
from gateway.http1.exchange import Exchange
from gateway.streams.event_stream import EventStream, EventStreamLimits, Flusher
from shared.messages import Delta, Finish


class _PlainPath:
    """What each plain token reads, in one place of memory as in `_Progress` of a flight."""

    __slots__ = ("_is_plain", "_prefix", "_stream", "_suffix")

    _is_plain: bool
    _prefix: bytes
    _stream: EventStream
    _suffix: bytes


class StreamedChoice(_PlainPath):
    """Sink of one choice. Its first output is written at once; later text waits for the flush."""

    __slots__ = ("_answer", "_chunks", "_has_begun", "_index")

    def __init__(self, answer: StreamedAnswer, stream: EventStream, chunks: ChoiceChunks, index: int) -> None:
        """Encode with `chunks` into `stream`."""
        self._answer = answer
        self._stream = stream
        self._chunks = chunks
        self._index = index
        self._prefix = self._suffix = b""
        self._has_begun = False
        self._is_plain = False

    def deliver(self, delta: Delta) -> None:
        """Turn a delta into events. The first branch runs once per token and stream: it is the hot path."""
        if self._is_plain and delta.finish is None and delta.logprobs is None:
            text = delta.text
            if text:
                # As `encode_text` does, without its call for what is ASCII.
                encoded = encode_json(text) if text.isascii() else encode_text(text)
                self._stream.send(self._prefix + encoded + self._suffix)
            return
        self._deliver_any(delta)

    def fail(self, error: ApiError) -> None:
        """End the whole answer: the other choices cannot make it complete."""
        self._answer.fail(error)

    def _deliver_any(self, delta: Delta) -> None:
        answer = self._answer
        if answer.done.done() or not (delta.token_ids or delta.text or delta.finish):
            return
        events = self._chunks.content(delta)
        if not self._has_begun:
            self._begin()
            events = self._chunks.opening() + events
            answer.note_output()
            if delta.finish is None and events:
                self._stream.send_now(events)
                return
        if delta.finish is not None:
            self._is_plain = False
            more = context_fields(delta.finish, answer.max_tokens)
            events += self._chunks.finish(delta.finish.reason, more)
        if events:
            self._stream.send(events)
        if delta.finish is not None:
            answer.finish_choice(self._index, delta.finish)

    def _begin(self) -> None:
        chunks = self._chunks
        chunks.prepare()
        self._prefix, self._suffix = chunks.prefix, chunks.suffix
        self._has_begun, self._is_plain = True, chunks.details is None


class ReadStreamedChoice(ReadChoice):
    """Turns what is read into chunks. The first ones are written at once; later ones wait for the flush."""

    def __init__(
        self, answer: Answer, stream: EventStream, chunks: ChoiceChunks, index: int, reading: OutputReading
    ) -> None:
        """Encode with `chunks` into `stream`."""
        super().__init__(answer, index, reading)
        self._stream = stream
        self._chunks = chunks
        self._has_begun = False
        self._has_written = False
        self._events: list[bytes] = []

    def content(self, text: str) -> None:
        """Add a chunk."""
        self._open("")
        self._events.append(self._chunks.text(text, self.take_logprobs()))

    def reasoning(self, text: str) -> None:
        """Add a chunk."""
        self._open("")
        self._events.append(self._chunks.reasoning(text, self.take_logprobs()))

    def call_started(self, index: int, name: str) -> None:
        """Add a chunk with the call's id and name."""
        self._open(None)
        self._events.append(self._chunks.call(index, new_call_id(), name, self.take_logprobs()))

    def call_arguments(self, index: int, text: str) -> None:
        """Add a chunk."""
        self._events.append(self._chunks.arguments(index, text, self.take_logprobs()))

    def delivered(self, finish: Finish | None) -> None:
        """Send the chunks, and the last one when the choice has ended."""
        if finish is not None:
            self._open("")
            reason = finish_reason(finish.reason, self.num_calls, self._reading.is_function_call)
            more = context_fields(finish, self._answer.max_tokens)
            self._events.append(self._chunks.finish(reason, more, self.take_logprobs()))
        if not self._events:
            return
        data = b"".join(self._events)
        self._events.clear()
        if self._has_written or finish is not None:
            self._stream.send(data)
        else:
            self._has_written = True
            self._stream.send_now(data)

    def _open(self, content: str | None) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._events.append(self._chunks.opening(content))


class StreamedAnswer(EventAnswer):
    """An answer as an event stream."""

    def __init__(
        self,
        exchange: Exchange,
        generation: Generation,
        identity: AnswerIdentity,
        head: ResponseHead,
        flusher: Flusher,
        limits: EventStreamLimits,
        now: float,
    ) -> None:
        """Encode nothing yet. `now` is loop time."""
        super().__init__(exchange, generation, head, flusher, limits, now)
        self._chunks: list[ChoiceChunks] = []
        self._identity = identity
        self._include_usage = generation.include_usage
        self.sinks = [self._sink(generation, index) for index in range(generation.num_sequences)]

    def make_ready(self) -> None:
        """Encode the templates of all choices."""
        for chunks in self._chunks:
            chunks.prepare()

    def _sink(self, generation: Generation, index: int) -> Sink:
        wanted = generation.details
        if wanted is None:
            return self._choice(generation, index, None)
        details = ChoiceDetails(wanted, generation.kind)
        return DetailedSink(self._choice(generation, index, details), details, wanted)

    def _choice(self, generation: Generation, index: int, details: ChoiceDetails | None) -> Sink:
        reading = generation.reading
        is_function_call = reading is not None and reading.is_function_call
        chunks = ChoiceChunks(self._identity, index, self._include_usage, details, is_function_call=is_function_call)
        self._chunks.append(chunks)
        if reading is None:
            return StreamedChoice(self, self._stream, chunks, index)
        return ReadStreamedChoice(self, self._stream, chunks, index, reading)

    def _complete(self) -> None:
        is_wanted = self._include_usage
        self._stream.end(usage_event(self._identity, usage_fields(self.usage)) if is_wanted else b"")
