"""A message as an event stream."""

from __future__ import annotations

from gateway.anthropic.blocks import BlockEvents
from gateway.anthropic.dialect import event
from gateway.anthropic.message import new_message, stop_fields, usage, usage_of
from gateway.api.answer import Answer
from gateway.api.endpoint import Asked, StreamParts
from gateway.api.event_answer import EventAnswer
from gateway.api.read_choice import ReadChoice
from gateway.generation import PLAIN_READING, OutputReading
from gateway.streams.event_stream import EventStream
from shared.messages import Delta, Finish


class StreamedMessage(EventAnswer):
    """An answer as the events of one message."""

    def __init__(self, asked: Asked, parts: StreamParts) -> None:
        """Prepare the only sink."""
        generation = asked.generation
        super().__init__(asked.exchange, generation, asked.head, parts.flusher, parts.limits, parts.now)
        reading = generation.reading or PLAIN_READING
        self._choice = _StreamedChoice(self, self._stream, generation.model, reading)
        self.sinks = [self._choice]

    def _complete(self) -> None:
        delta = {"type": "message_delta", "delta": self._choice.stop_fields(), "usage": usage_of(self.usage)}
        self._stream.end(event(delta) + event({"type": "message_stop"}))


class _StreamedChoice(ReadChoice):
    def __init__(self, answer: Answer, stream: EventStream, model: str, reading: OutputReading) -> None:
        super().__init__(answer, 0, reading)
        self._stream = stream
        self._model = model
        self._blocks = BlockEvents()
        self._prompt_tokens = 0
        self._has_begun = False
        self._events: list[bytes] = []
        self._finish: Finish | None = None

    def deliver(self, delta: Delta) -> None:
        """Take note of the prompt's length, which the opening tells."""
        if delta.prompt_tokens is not None:
            self._prompt_tokens = delta.prompt_tokens
        super().deliver(delta)

    def content(self, text: str) -> None:
        self._events.append(self._blocks.text(text))

    def reasoning(self, text: str) -> None:
        self._events.append(self._blocks.thinking(text))

    def call_started(self, index: int, name: str) -> None:
        self._events.append(self._blocks.call(name))

    def call_arguments(self, index: int, text: str) -> None:
        self._events.append(self._blocks.arguments(text))

    def delivered(self, finish: Finish | None) -> None:
        """Send the events. Those of the first output are written at once."""
        is_first = not self._has_begun
        if is_first:
            self._has_begun = True
            message = new_message(self._model) | {"usage": usage(self._prompt_tokens, 0, 0)}
            self._events.insert(0, event({"type": "message_start", "message": message}))
        if finish is not None:
            self._finish = finish
            self._events.append(self._blocks.close())
        if not self._events:
            return
        data = b"".join(self._events)
        self._events.clear()
        if is_first and finish is None:
            self._stream.send_now(data)
        else:
            self._stream.send(data)

    def stop_fields(self) -> dict[str, str | None]:
        """Return why the message stopped."""
        assert self._finish is not None, "the answer is complete"
        return stop_fields(self._finish, self.num_calls, self._answer.max_tokens)
