"""Streamed answers: each choice is a sink that turns deltas into events of one event stream."""

from __future__ import annotations

from gateway.api.answer import Answer, Asked, EventAnswer, StreamParts
from gateway.api.chat_answers import AnswerIdentity, finish_reason, stop_reason, usage_answer
from gateway.api.chunks import ChoiceChunks, encode_json, encode_text, usage_event
from gateway.api.details import ChoiceDetails, DetailedSink
from gateway.api.read_choice import ReadChoice
from gateway.dispatch.sinks import Sink
from gateway.generation import PLAIN_READING, Generation, OutputReading
from gateway.streams.event_stream import EventStream
from shared.messages import Delta, Finish


class StreamedChoice(ReadChoice):
    """Sink of one choice. Its first output is written at once; later chunks wait for the flush."""

    # Each plain token reads these four, which lie together.
    __slots__ = ("_chunks", "_events", "_has_begun", "_has_written", "_is_plain", "_prefix", "_stream", "_suffix")

    def __init__(
        self, answer: Answer, stream: EventStream, chunks: ChoiceChunks, index: int, reading: OutputReading
    ) -> None:
        super().__init__(answer, index, reading)
        self._stream = stream
        self._chunks = chunks
        self._prefix = self._suffix = b""
        self._has_begun = self._has_written = self._is_plain = False
        self._events: list[bytes] = []

    def opening(self) -> bytes:
        """Return the event that opens the choice, which is not sent again."""
        self._has_begun = True
        return self._chunks.opening() or self._chunks.text("", ())

    def deliver(self, delta: Delta) -> None:
        """Turn a delta into events. The first branch runs once per token and stream: it is the hot path."""
        if self._is_plain and delta.finish is None and delta.logprobs is None:
            text = delta.text
            if text:
                # As `encode_text` does, without its call for ASCII.
                encoded = encode_json(text) if text.isascii() else encode_text(text)
                self._stream.send(self._prefix + encoded + self._suffix)
            return
        super().deliver(delta)

    def content(self, text: str) -> None:
        """Add a chunk."""
        self._add(self._chunks.text(text, self.take_logprobs(), self.first_token))

    def reasoning(self, text: str) -> None:
        """Add a chunk."""
        self._add(self._chunks.reasoning(text, self.take_logprobs()))

    def call_started(self, index: int, name: str) -> None:
        """Add a chunk with the call's id and name."""
        self._add(self._chunks.call(index, name, self.take_logprobs()), None)

    def call_arguments(self, index: int, text: str) -> None:
        """Add a chunk."""
        self._add(self._chunks.arguments(index, text, self.take_logprobs()))

    def delivered(self, finish: Finish | None) -> None:
        """Send the chunks, and the last one when the choice has ended."""
        if self._reading is PLAIN_READING:
            self._deliver_plain(finish)
        if finish is not None:
            reason = finish_reason(finish.reason, self.num_calls, self._reading.is_function_call)
            stop = stop_reason(finish, self._answer.max_tokens)
            self._add(self._chunks.finish(reason, stop, self.take_logprobs()))
        data = b"".join(self._events)
        self._events.clear()
        if not data:
            return
        if self._has_written or finish is not None:
            self._stream.send(data)
        else:
            self._has_written = True
            self._stream.send_now(data)

    def _deliver_plain(self, finish: Finish | None) -> None:
        """Report tokens without text too, since all of them are content, and take the short way from now on."""
        if self._logprobs:
            self.content("")
        self._add(b"")
        chunks = self._chunks
        chunks.prepare()
        self._prefix, self._suffix = chunks.prefix, chunks.suffix
        self._is_plain = finish is None and chunks.details is None

    def _add(self, chunk: bytes, content: str | None = "") -> None:
        """Send a chunk with this delivery, after the one that opens the choice; its content is null before a call."""
        if not self._has_begun:
            self._has_begun = True
            self._events.append(self._chunks.opening(content))
        self._events.append(chunk)


class StreamedAnswer(EventAnswer):
    """An answer as an event stream."""

    def __init__(self, asked: Asked, parts: StreamParts, identity: AnswerIdentity) -> None:
        super().__init__(asked, parts)
        generation = asked.generation
        self._chunks: list[ChoiceChunks] = []
        self._choices: list[StreamedChoice] = []
        self._identity = identity
        self._include_usage = generation.include_usage
        self.sinks = [self._sink(generation, index) for index in range(generation.num_sequences)]

    def make_ready(self) -> None:
        """Encode the templates of all choices."""
        for chunks in self._chunks:
            chunks.prepare()

    def open(self) -> None:
        """Send the event that opens each choice."""
        self._stream.send_now(b"".join(choice.opening() for choice in self._choices))

    def close(self) -> None:
        """Let go of what refers back to the answer."""
        super().close()
        self._choices = []

    def _sink(self, generation: Generation, index: int) -> Sink:
        wanted = generation.details
        if wanted is None:
            return self._choice(generation, index, None)
        details = ChoiceDetails(wanted, generation.kind)
        return DetailedSink(self._choice(generation, index, details), details, wanted)

    def _choice(self, generation: Generation, index: int, details: ChoiceDetails | None) -> Sink:
        reading = generation.reading or PLAIN_READING
        chunks = ChoiceChunks(
            self._identity, index, self._include_usage, details, is_function_call=reading.is_function_call
        )
        self._chunks.append(chunks)
        choice = StreamedChoice(self, self._stream, chunks, index, reading)
        self._choices.append(choice)
        return choice

    def _complete(self) -> None:
        is_wanted = self._include_usage
        self._stream.end(usage_event(self._identity, usage_answer(self.usage)) if is_wanted else b"")
