"""Streamed answers: each choice is a sink that turns deltas into events of one event stream.

The bytes that all chunks of a choice have in common are encoded once, at its start. Per token only the text is escaped,
between a prefix and a suffix of bytes: no struct and no JSON encoder sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.answer import Answer, Asked, EventAnswer, StreamParts
from gateway.api.chat_answers import (
    CONTEXT_FULL,
    AnswerIdentity,
    CallFunctionDelta,
    ChatChunkChoice,
    CompletionChoice,
    FinishReason,
    MessageDelta,
    StopReason,
    ToolCallDelta,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
    is_context_full,
    usage_answer,
)
from gateway.api.details import ChoiceDetails, DetailedSink
from gateway.api.read_choice import ReadChoice
from gateway.dispatch.sinks import Sink
from gateway.generation import PLAIN_READING, Generation, OutputReading
from gateway.streams.dialect import one_line, server_sent_event
from gateway.streams.event_stream import EventStream
from shared.messages import Delta, Finish, TokenLogprob

Entries = Sequence[TokenLogprob | None]

encode_json = msgspec.json.Encoder().encode

_MARKER = "\x00text\x00"


def encode_text(text: str) -> bytes:
    """Return a text as JSON for an event."""
    return encode_json(text) if text.isascii() else one_line(encode_json(text))


@dataclass(slots=True, eq=False)
class ChoiceChunks:
    """Encoder of one choice's chunks.

    Attributes:
        prefix: Bytes before the JSON string of the text, in a chunk that has text alone; empty before `prepare`.
        suffix: Bytes after it.
        details: Reported besides text, so that no chunk has text alone; None for nothing.
    """

    identity: AnswerIdentity
    index: int
    with_usage: bool
    details: ChoiceDetails | None = None
    is_function_call: bool = False
    prefix: bytes = field(default=b"", init=False)
    suffix: bytes = field(default=b"", init=False)
    _reasoning: list[bytes] = field(default_factory=list, init=False)
    # The template of the arguments of each call, in their order.
    _arguments: list[list[bytes]] = field(default_factory=list, init=False)
    _offset: int = field(default=0, init=False)

    def prepare(self) -> None:
        """Encode the template, unless that has been done: before the first text comes, or with it."""
        details, self.details = self.details, None
        self.prefix, suffix = self._content(_MARKER).split(encode_json(_MARKER))
        self.suffix = _shared(suffix)
        self.details = details

    def opening(self, content: str | None = "") -> bytes:
        """Return the chunk before the first text: chat says who speaks, completions say nothing.

        The content is null before a call.
        """
        if self.identity.kind == "completion":
            return b""
        return self._delta(MessageDelta("assistant", content))

    def text(self, text: str, logprobs: Entries, first_token: str = "") -> bytes:
        """Return a chunk of content, with the log probabilities since the last; `first_token` names a None."""
        if not logprobs and self.details is None:
            if not self.prefix:
                self.prepare()
            return self.prefix + encode_text(text) + self.suffix
        return self._content(text, logprobs, first_token)

    def reasoning(self, text: str, logprobs: Entries) -> bytes:
        """Return a chunk of reasoning."""
        if logprobs or self.details is not None:
            return self._delta(_reasoning(text), logprobs)
        self._reasoning = self._reasoning or self._template(_reasoning(_MARKER))
        return encode_text(text).join(self._reasoning)

    def call(self, index: int, name: str, logprobs: Entries) -> bytes:
        """Return the chunk that opens a call."""
        call_id = self.identity.call_id(self.index, index)
        if self.details is None:
            self._arguments.append(self._template(self._call_delta(ToolCallDelta(index), _MARKER)))
        return self._delta(self._call_delta(ToolCallDelta(index, call_id, "function"), "", name), logprobs)

    def arguments(self, index: int, text: str, logprobs: Entries) -> bytes:
        """Return a chunk of a call's arguments."""
        if logprobs or self.details is not None:
            return self._delta(self._call_delta(ToolCallDelta(index), text), logprobs)
        return encode_text(text).join(self._arguments[index])

    def finish(self, reason: FinishReason, stop: StopReason | UnsetType, logprobs: Entries = ()) -> bytes:
        """Return the chunk that says why the choice ended."""
        if self.identity.kind == "completion":
            return self._encode(CompletionChoice(self.index, "", None, reason, stop))
        told = chat_logprobs(logprobs) if logprobs else None
        return self._encode(ChatChunkChoice(self.index, MessageDelta(), told, reason, stop))

    def _call_delta(self, call: ToolCallDelta, arguments: str, name: str | UnsetType = UNSET) -> MessageDelta:
        function = CallFunctionDelta(name, arguments)
        if self.is_function_call:
            return MessageDelta(function_call=function)
        call.function = function
        return MessageDelta(tool_calls=[call])

    def _template(self, delta: MessageDelta) -> list[bytes]:
        return self._delta(delta).split(encode_json(_MARKER))

    def _content(self, text: str, logprobs: Entries = (), first_token: str = "") -> bytes:
        if self.identity.kind == "chat":
            return self._delta(MessageDelta(content=text), logprobs)
        told = completion_logprobs(logprobs, self._offset, first_token) if logprobs else None
        if told is not None:
            self._offset += sum(map(len, told.tokens))
        return self._encode(CompletionChoice(self.index, text, told, None))

    def _delta(self, delta: MessageDelta, logprobs: Entries = ()) -> bytes:
        told = chat_logprobs(logprobs) if logprobs else None
        return self._encode(ChatChunkChoice(self.index, delta, told, None))

    def _encode(self, choice: ChatChunkChoice | CompletionChoice) -> bytes:
        answer, details = self.identity.chunk([choice], None if self.with_usage else UNSET), self.details
        if details is not None:
            details.report(answer, choice)
            answer.usage = details.usage_so_far() or answer.usage
        return server_sent_event(encode_json(answer))


def _reasoning(text: str) -> MessageDelta:
    return MessageDelta(reasoning_content=text, reasoning=text)


@lru_cache(maxsize=64)
def _shared(suffix: bytes) -> bytes:
    """Return one object for all that are equal: thousands of streams have the same few, and each token reads one."""
    return suffix


class _StreamedChoice(ReadChoice):
    """Sink of one choice. Its first output is written at once; later chunks wait for the flush."""

    # Each plain token reads these four, which lie together.
    __slots__ = ("_events", "_has_begun", "_has_written", "_is_plain", "_prefix", "_stream", "_suffix", "chunks")

    def __init__(
        self, answer: Answer, stream: EventStream, chunks: ChoiceChunks, index: int, reading: OutputReading
    ) -> None:
        super().__init__(answer, index, reading)
        self._stream = stream
        self.chunks = chunks
        self._prefix = self._suffix = b""
        self._has_begun = self._has_written = self._is_plain = False
        self._events: list[bytes] = []

    def opening(self) -> bytes:
        """Return the event that opens the choice, which is not sent again."""
        self._has_begun = True
        return self.chunks.opening() or self.chunks.text("", ())

    def deliver(self, delta: Delta) -> None:
        """Turn a delta into events. The first branch runs once per token and stream: it is the hot path."""
        if self._is_plain and delta.finish is None and delta.logprobs is None:
            text = delta.text
            if text:
                # As `encode_text` does, without its call for ASCII.
                encoded = encode_json(text) if text.isascii() else encode_text(text)
                self._stream.send_event(self._prefix + encoded + self._suffix)
            return
        super().deliver(delta)

    def content(self, text: str) -> None:
        self._add(self.chunks.text(text, self.take_logprobs(), self.first_token))

    def reasoning(self, text: str) -> None:
        self._add(self.chunks.reasoning(text, self.take_logprobs()))

    def call_started(self, index: int, name: str) -> None:
        self._add(self.chunks.call(index, name, self.take_logprobs()), None)

    def call_arguments(self, index: int, text: str) -> None:
        self._add(self.chunks.arguments(index, text, self.take_logprobs()))

    def delivered(self, finish: Finish | None) -> None:
        """Send the chunks, and the last one when the choice has ended."""
        chunks = self.chunks
        if self._reading is PLAIN_READING:
            # Tokens without text are reported too, since all of them are content, and go the short way from now on.
            if self._logprobs:
                self.content("")
            if not self._has_begun:
                self._add(b"")
            if not chunks.prefix:
                chunks.prepare()
            self._prefix, self._suffix = chunks.prefix, chunks.suffix
            self._is_plain = finish is None and chunks.details is None
        if finish is not None:
            reason = finish_reason(finish.reason, self.num_calls, self._reading.is_function_call)
            stop = CONTEXT_FULL if is_context_full(finish, self._answer.max_tokens) else UNSET
            self._add(chunks.finish(reason, stop, self.take_logprobs()))
        data = b"".join(self._events)
        self._events.clear()
        if not data:
            return
        if self._has_written or finish is not None:
            self._stream.send(data)
        else:
            self._has_written = True
            self._stream.send_now(data)

    def _add(self, chunk: bytes, content: str | None = "") -> None:
        """Send a chunk with this delivery, after the one that opens the choice; its content is null before a call."""
        if not self._has_begun:
            self._has_begun = True
            self._events.append(self.chunks.opening(content))
        self._events.append(chunk)


class StreamedAnswer(EventAnswer):
    """An answer as an event stream."""

    def __init__(self, asked: Asked, parts: StreamParts, identity: AnswerIdentity) -> None:
        super().__init__(asked, parts)
        self._choices: list[_StreamedChoice] = []
        self._identity = identity
        self._include_usage = asked.generation.include_usage
        self.sinks = [self._sink(asked.generation, index) for index in range(self._num_unfinished)]

    def make_ready(self) -> None:
        """Encode the templates of all choices."""
        for choice in self._choices:
            if not choice.chunks.prefix:
                choice.chunks.prepare()

    def open(self) -> None:
        """Send the event that opens each choice."""
        self._stream.send_now(b"".join(choice.opening() for choice in self._choices))

    def close(self) -> None:
        """Drop references back to the answer."""
        super().close()
        self._choices = []

    def _sink(self, generation: Generation, index: int) -> Sink:
        reading = generation.reading or PLAIN_READING
        details = None if generation.details is None else ChoiceDetails(generation.details, generation.kind)
        chunks = ChoiceChunks(self._identity, index, self._include_usage, details, reading.is_function_call)
        choice = _StreamedChoice(self, self._stream, chunks, index, reading)
        self._choices.append(choice)
        return choice if details is None else DetailedSink(choice, details)

    def _complete(self) -> None:
        last = self._identity.chunk([], usage_answer(self.usage)) if self._include_usage else None
        self._stream.end(b"" if last is None else server_sent_event(encode_json(last)))
