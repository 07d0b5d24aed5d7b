"""One HTTP answer made of several sequences: what streamed and whole answers have in common.

An answer owns its end. Whichever comes first decides it: all choices finished, one of them failed, the client left, or
the client read too slowly. `done` then has the outcome, and everything that arrives later is ignored.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import urandom

import msgspec
from msgspec import Struct

from gateway.admission.auth import Principal
from gateway.api.output_reading import image_places, naming_conversation, naming_field, naming_image
from gateway.api.request_observer import RequestRecord
from gateway.api.usage import UsageTotals
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.http1.exchange import Exchange, Headers
from gateway.streams.dialect import OPENAI, Dialect
from gateway.streams.event_stream import EVENT_STREAM_HEADERS, EventStream, EventStreamLimits, Flusher
from gateway.streams.numbered import NumberedEventStream
from shared.messages import Finish


class Outcome(enum.Enum):
    """How an answer ended, from the client's point of view."""

    COMPLETED = "completed"
    FAILED = "failed"
    DISCONNECTED = "disconnected"
    SLOW_READER = "slow_reader"


class AnswerStamp(Struct, frozen=True, array_like=True):
    """Unique to each answer: the token from which its ids are made, and its time in Unix seconds."""

    token: str
    created: int

    @classmethod
    def new(cls) -> AnswerStamp:
        """Return a stamp that no other answer has."""
        return cls(urandom(12).hex(), int(time.time()))

    def derived(self, *place: int) -> str:
        """Return 24 digits for the id of a part of the answer. A replayed answer has the same ids."""
        return hashlib.sha256(f"{self.token}/{place}".encode()).hexdigest()[:24]


@dataclass(slots=True, eq=False)
class ResponseHead:
    """A request as the door of the port knows it, and the headers of its answer.

    Attributes:
        request_id: The answer's `x-request-id`.
        started: `time.perf_counter()` when the request arrived.
        dialect: Format of errors.
        first_event: Number of the first event that the client wants; None for a stream without numbers.
        limits: The `x-ratelimit-*` headers, once they are known.
        model: The one in the path, as Azure's clients send it; None for any other path.
        route: Our own name of the route, once it is found; answers are counted by it.
        status: Status for metrics; 0 for the status that is sent.
        record: Where a generation is noted for the log and for traces.
    """

    request_id: str
    started: float
    dialect: Dialect = OPENAI
    first_event: int | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    route: str = ""
    status: int = 0
    record: RequestRecord | None = None

    def headers(self, more: Headers) -> Headers:
        """Return the headers but those that the door adds to every answer; `openai-processing-ms` as of now."""
        elapsed_ms = round((time.perf_counter() - self.started) * 1000)
        return [
            *more,
            (b"openai-processing-ms", b"%d" % elapsed_ms),
            *((name.encode(), value.encode()) for name, value in self.limits.items()),
        ]


class Asked(Struct, frozen=True):
    """A request that is to be answered; a struct of msgspec, as `Generation` is, because there is one a request.

    Attributes:
        exchange: Where the answer goes.
        generation: As its model reads it.
        head: The answer's headers.
        principal: The holder of the key.
        fingerprint: Names the files of the model that answers; None if no worker has reported it.
        stamp: Token and time of the answer.
    """

    exchange: Exchange
    generation: Generation
    head: ResponseHead
    principal: Principal
    fingerprint: str | None = None
    stamp: AnswerStamp = msgspec.field(default_factory=AnswerStamp.new)


class StreamParts(Struct, frozen=True):
    """Parts that every event stream needs. `now` is loop time."""

    flusher: Flusher
    limits: EventStreamLimits
    now: float


class Answer(ABC):
    """Base of the two kinds of answers.

    Attributes:
        sinks: One per sequence, in the order of the choices.
        done: Resolves to the outcome.
        error: The error, when the outcome is `FAILED`.
        first_token_at: `time.perf_counter()` at the first output, or None.
        max_tokens: The client's limit of each choice, or None.
    """

    sinks: Sequence[Sink]

    def __init__(self, asked: Asked) -> None:
        self._exchange = exchange = asked.exchange
        self._head = asked.head
        generation = asked.generation
        self._num_unfinished = generation.num_sequences
        self.max_tokens = generation.sampling.max_tokens
        self.usage = UsageTotals(generation.n)
        self.done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.error: ApiError | None = None
        output = generation.structured_output
        self._grammar_field = "tools" if output is None else output.field
        self._image_places = image_places(generation)
        self._conversation_field = generation.conversation_field
        self.first_token_at: float | None = None
        exchange.on_disconnect = self._disconnect
        if exchange.disconnected:
            self._disconnect()

    def make_ready(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare the first output while the generation, just dispatched, is on its way."""

    def open(self) -> None:  # noqa: B027 - only streams whose events have ids begin before there is output
        """Send the events that need no output, so that a client knows the ids before the first token."""

    def break_off(self, error: ApiError) -> None:
        """End this answer, not its generation, with an error."""
        self.fail(error)

    def check_position(self) -> None:  # noqa: B027 - only streams whose events have ids have positions
        """Refuse a client that wants an event that does not exist yet.

        Raises:
            ApiError: 400; it names how many there are.
        """

    @property
    def is_paused(self) -> bool:
        """Whether the client has enough unread bytes for now."""
        return self._exchange.paused_since is not None

    @property
    def has_begun(self) -> bool:
        """Whether the status is out, so that the client cannot be refused any more."""
        return self._exchange.started

    @property
    def num_tokens(self) -> int:
        """Tokens that a complete answer counts against its key's tokens per minute."""
        return self.usage.prompt_tokens + self.usage.completion_tokens

    def fail(self, error: ApiError) -> None:
        """End the answer with an error, which is sent to the client."""
        if not self.done.done():
            error = naming_image(naming_field(error, self._grammar_field), self._image_places)
            error = naming_conversation(error, self._conversation_field)
            self.error = error
            self._report(error)
            # Its traceback leads to this answer through the frames of the request, which hold the prompt: a circle that
            # a garbage collection alone would end.
            error.__traceback__ = error.__context__ = None
            self.end(Outcome.FAILED)

    def finish_choice(self, index: int, finish: Finish) -> None:
        """Note that a choice is complete; with the last one the answer is."""
        if self.done.done():
            return
        self.usage.add(index, finish.usage)
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self._complete()
            self.end(Outcome.COMPLETED)

    def close(self) -> None:
        """Drop references back to the answer, so that it is freed at once and not by the garbage collector."""
        self.sinks = ()
        self._exchange.on_disconnect = self._exchange.on_writable = None

    def tick(self, now: float) -> None:  # noqa: B027 - only streams react
        """React to silence and slowness. `now` is loop time."""

    def note_output(self) -> None:
        """Note that the first output has come."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
            if (record := self._head.record) is not None:
                record.first_token_at = record.began_at + self.first_token_at - self._head.started

    def end(self, outcome: Outcome) -> None:
        """Decide the outcome, once."""
        if not self.done.done():
            self.done.set_result(outcome)

    def _disconnect(self) -> None:
        self.end(Outcome.DISCONNECTED)

    def _respond(self, body: bytes) -> None:
        self._exchange.respond(200, self._head.headers([(b"content-type", b"application/json")]), body)

    def _report(self, error: ApiError) -> None:
        head = self._head
        self._exchange.respond(error.status, head.headers(error.response_headers()), head.dialect.error_body(error))

    @abstractmethod
    def _complete(self) -> None:
        """Tell the client that all choices are finished."""


class EventAnswer(Answer):
    """Base of answers that are event streams. Derived classes set `sinks` and write to `_stream`."""

    def __init__(self, asked: Asked, parts: StreamParts) -> None:
        super().__init__(asked)
        cut, head = partial(self.end, Outcome.SLOW_READER), asked.head
        headers = partial(head.headers, EVENT_STREAM_HEADERS)
        stream = (asked.exchange, parts.flusher, parts.limits, headers, parts.now, head.dialect, cut)
        self._numbered: NumberedEventStream | None = None
        if head.first_event is None:
            self._stream = EventStream(*stream)
        else:
            self._stream = self._numbered = NumberedEventStream(*stream, head.first_event, super()._report)

    def close(self) -> None:
        """Drop references back to the answer."""
        super().close()
        self._stream.close()

    def break_off(self, error: ApiError) -> None:
        """End this answer, not its generation, with an error, which is not an event of the answer."""
        if self._numbered is not None and not self.done.done():
            self._numbered.has_ids = False
        self.fail(error)

    def check_position(self) -> None:
        """Refuse a client that wants an event that does not exist yet."""
        if self._numbered is not None and self._numbered.is_behind and not self.done.done():
            raise self._numbered.beyond()

    def tick(self, now: float) -> None:
        """Let the stream react to silence and slowness. `now` is loop time."""
        if not self.done.done():
            self._stream.tick(now)

    def _report(self, error: ApiError) -> None:
        numbered = self._numbered
        # A failed generation ends with an error event, which replays contain too.
        is_event = numbered is not None and numbered.has_ids and numbered.num_events > 0
        if self._stream.is_open or is_event:
            self._stream.end(self._head.dialect.error_event(error))
        else:
            super()._report(error)
