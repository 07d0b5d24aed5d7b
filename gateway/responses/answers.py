"""Answers to `POST /v1/responses`: whole, or as a stream of typed events.

One object is the answer and the sink of its only sequence. A response with `store` is stored before its completion is
sent to the client, so that every gateway can read any response that a client has seen complete.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from functools import partial
from typing import Any

import msgspec

from gateway.api.answer import Answer, Asked, EventAnswer, Outcome, StreamParts
from gateway.api.chat_answers import chat_logprobs
from gateway.api.read_choice import ReadChoice
from gateway.errors import ApiError
from gateway.generation import PLAIN_READING, Generation
from gateway.responses.draft import (
    EventWriter,
    ResponseError,
    ResponseGeneration,
    ResponseUsage,
    Status,
    response_fields,
)
from gateway.responses.output import CompactionOutput, EventSink, ResponseOutput, no_events
from gateway.responses.store import ResponseStore
from shared.background_tasks import BackgroundTasks
from shared.messages import Finish


class _ResponseChoice(ReadChoice):
    """Sink of the only sequence: puts its text into the output."""

    def __init__(self, answer: ResponseAnswer, generation: Generation, output: ResponseOutput) -> None:
        super().__init__(answer, 0, generation.reading or PLAIN_READING)
        self._response = answer
        self._output = output

    def content(self, text: str) -> None:
        logprobs = self.take_logprobs()
        told: list[Any] | None = chat_logprobs(logprobs).content if logprobs else None
        self._output.content(text, told)

    def reasoning(self, text: str) -> None:
        """Add to a reasoning item. Only messages have log probabilities."""
        self.take_logprobs()
        self._output.reasoning(text)

    def call_started(self, index: int, name: str) -> None:
        self.take_logprobs()
        self._output.call_started(name)

    def call_arguments(self, index: int, text: str) -> None:
        self.take_logprobs()
        self._output.call_arguments(text)

    def delivered(self, finish: Finish | None) -> None:
        if finish is not None:
            self._output.finish(is_complete=finish.reason != "length")
        self._response.delivered()


class ResponseAnswer(Answer):
    """Base of both kinds of answers."""

    def prepare(self, asked: Asked, store: ResponseStore, emit: EventSink) -> None:
        """Answer `asked` with events to `emit`, and store the response."""
        generation = asked.generation
        assert isinstance(generation, ResponseGeneration)
        self._draft = generation.draft
        self._keep = partial(store.keep, asked.principal.tenant, generation)
        self._tasks = BackgroundTasks()
        kind = CompactionOutput if self._draft.is_compaction else ResponseOutput
        self._output = kind(self._draft, emit, store.seal_of(asked.principal.tenant, generation.name))
        self.sinks = (_ResponseChoice(self, generation, self._output),)

    def delivered(self) -> None:
        """Learn that a delta has been read."""

    def finish_choice(self, index: int, finish: Finish) -> None:
        """Store the response, then complete the answer."""
        if self.done.done():
            return
        self.usage.add(index, finish.usage)
        if self._draft.is_compaction and not self._output.items:
            message = "The model wrote no summary of the conversation, so it stays as it is. Ask again."
            self.fail(ApiError(502, message, code="no_summary"))
            return
        self._tasks.spawn(self._conclude("incomplete" if finish.reason == "length" else "completed"))

    def close(self) -> None:
        """Let go of what refers back to the answer."""
        super().close()
        self._output.close()

    async def _conclude(self, status: Status) -> None:
        response = self._response(status)
        if self._draft.is_stored:
            response["store"] = await self._keep(response)
        if not self.done.done():
            self._send(response)
            self.end(Outcome.COMPLETED)

    def _response(self, status: Status, error: ResponseError | None = None) -> dict[str, Any]:
        usage = ResponseUsage.of(
            input_tokens=self.usage.prompt_tokens,
            output_tokens=self.usage.completion_tokens,
            cached_tokens=self.usage.cached_tokens,
            reasoning_tokens=self.usage.reasoning_tokens,
        )
        return response_fields(
            self._draft,
            status,
            self._output.items,
            usage=usage if status in ("completed", "incomplete") else None,
            error=error,
            completed_at=int(time.time()) if status == "completed" else None,
        )

    def _complete(self) -> None:
        raise AssertionError("a response is complete once it is stored")

    @abstractmethod
    def _send(self, response: dict[str, Any]) -> None:
        """Send the complete response."""


class WholeResponse(ResponseAnswer):
    """A response as one JSON body."""

    def __init__(self, asked: Asked, store: ResponseStore) -> None:
        super().__init__(asked)
        self.prepare(asked, store, no_events)

    def _send(self, response: dict[str, Any]) -> None:
        self._respond(msgspec.json.encode(response))


class StreamedResponse(ResponseAnswer, EventAnswer):
    """A response as a stream of events. Its first output is written at once; later output waits for the flush."""

    def __init__(self, asked: Asked, store: ResponseStore, parts: StreamParts) -> None:
        EventAnswer.__init__(self, asked, parts)
        self._events = EventWriter(self._stream.send)
        self._opened, self._head_delay_s = parts.now, parts.limits.head_delay_s
        self._has_written = False
        self.prepare(asked, store, self._emit)

    def delivered(self) -> None:
        """Write the first output at once."""
        if not self._has_written and self._events.num_events:
            self._has_written = True
            self._stream.flush()

    def tick(self, now: float) -> None:
        """Begin the stream where the first output takes long; react to silence and slowness. `now` is loop time."""
        if not (self.done.done() or self._events.num_events) and now - self._opened > self._head_delay_s:
            self._begin()
        super().tick(now)

    def _emit(self, kind: str, fields: dict[str, Any]) -> None:
        if not self._events.num_events:
            self._begin()
        self._events.emit(kind, fields)

    def _begin(self) -> None:
        self._events.begin(self._response("in_progress"))

    def _send(self, response: dict[str, Any]) -> None:
        self._events.end(response)
        self._stream.end()

    def _report(self, error: ApiError) -> None:
        if not self._events.num_events:
            super()._report(error)
            return
        code = error.code or ("invalid_prompt" if error.status < 500 else "server_error")
        self._send(self._response("failed", ResponseError(code, error.message)))
