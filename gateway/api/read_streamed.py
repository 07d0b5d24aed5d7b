"""Sink of one choice of a streamed chat answer whose text is read."""

from __future__ import annotations

from gateway.api.answer import Answer
from gateway.api.context_end import context_fields
from gateway.api.read_choice import ReadChoice
from gateway.api.read_chunks import ReadChunks
from gateway.api.tool_calls import finish_reason, new_call_id
from gateway.generation import OutputReading
from gateway.streams.event_stream import EventStream
from shared.messages import Finish


class ReadStreamedChoice(ReadChoice):
    """Turns what is read into chunks. The first ones are written at once; later ones wait for the flush."""

    def __init__(
        self, answer: Answer, stream: EventStream, chunks: ReadChunks, index: int, reading: OutputReading
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
            self._events.append(self._chunks.end(reason, self.take_logprobs(), more))
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
            self._events.append(self._chunks.opening_of(content))
