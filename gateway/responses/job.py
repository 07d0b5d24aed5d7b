"""A background response as a job of the batch lane: its record, its text, and its watch.

A worker's record of a job is heard on its subject before it can be read from its stream, and without asking.
`BackgroundStream` reads the stream all the same from time to time: records that are published while NATS is away are
lost to subscribers, and NATS may have permissions of an earlier version, which allow no subscription.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from gateway.api.output_reading import NO_TOOLS, reading_of
from gateway.generation import PLAIN_READING, OutputReading, ToolUse
from gateway.responses.draft import ResponseError, ResponseGeneration, ResponseUsage, Status
from gateway.responses.output import ResponseOutput
from shared.batch_progress import BatchProgress
from shared.direct_client import DirectClient
from shared.formats import ContentText, OutputEvent, OutputReader, ReasoningText, ToolCallArguments, ToolCallStart
from shared.messages import BatchResult, FinishReason
from shared.nats_connection import SEND_ERRORS, unsubscribe
from shared.subjects import progress_subject, stored_subject

_STATUSES: dict[FinishReason, Status] = {"stop": "completed", "length": "incomplete", "cancelled": "cancelled"}
# Pieces of text in the events of a background response have this many characters, the last one of an item apart. The
# first ones are shorter: 1, 2, 4, ... characters, so that a person sees the first token.
_PIECE_CHARACTERS = 32


class BackgroundJob(Struct, frozen=True, kw_only=True):
    """The data needed to follow a job and to read its output.

    Attributes:
        stream_seq: Sequence number of its message in the tenant's stream.
        deadline: Unix seconds after which it is no longer computed.
        chat_format: Format of the text; None if all of it is content.
        tools: Its tools.
        includes_reasoning: The client gets the reasoning.
    """

    stream_seq: int
    deadline: float
    chat_format: str | None = None
    tools: ToolUse | None = None
    includes_reasoning: bool = True

    @classmethod
    def of(cls, generation: ResponseGeneration, stream_seq: int, deadline: float) -> BackgroundJob:
        """Return the job of a generation that is in the queue."""
        reading, tools = generation.reading, generation.tools
        return cls(
            stream_seq=stream_seq,
            deadline=deadline,
            chat_format=None if reading is None else reading.format_name,
            tools=None if tools is None else replace(tools, schema_places=()),
            includes_reasoning=generation.includes_reasoning,
        )

    @property
    def reading(self) -> OutputReading:
        """How its text is read."""
        if self.chat_format is None:
            return PLAIN_READING
        return reading_of(self.chat_format, self.tools or NO_TOOLS, self.includes_reasoning)


def status_of(result: BatchResult) -> Status:
    """Return the status of a response whose job has ended."""
    return _STATUSES.get(result.finish, "failed")


def error_of(result: BatchResult) -> ResponseError | None:
    """Return why a job has failed, if it has."""
    if status_of(result) != "failed":
        return None
    is_late = result.finish == "expired"
    otherwise = "No worker has computed the response in time." if is_late else "The response could not be computed."
    return ResponseError("server_error", result.error or otherwise)


class JobReader:
    """Reads the text of a job so far into an output.

    The output and its events depend only on the text, not on the pieces in which it arrives. So every gateway sends the
    same events with the same numbers.

    Attributes:
        text: The text read so far.
    """

    def __init__(self, reading: OutputReading, output: ResponseOutput) -> None:
        self._reading = reading
        self._output = output
        self._reader: OutputReader | None = None
        self._kind: type[OutputEvent] | None = None
        self._pending = ""
        self._piece = 1
        self.text = ""
        self._num_reasoning = 0

    def read(self, text: str, *, in_reasoning: bool) -> bool:
        """Read a text that extends the one read before; False, and nothing is read, if it begins differently.

        Args:
            text: The whole text so far. It may be shorter than before: a worker may have restarted, or reported late.
            in_reasoning: Whether it begins in the middle of reasoning.
        """
        if self.text.startswith(text):
            # Of a job that has written nothing it is not even known where its text begins.
            return True
        if not text.startswith(self.text):
            return False
        if self._reader is None:
            self._reader = self._reading.new_reader(in_reasoning)
        more, self.text = text[len(self.text) :], text
        self._take(self._reader.feed(more) if more else [])
        return True

    def finish(self, *, is_complete: bool) -> None:
        """Read the rest when the text has ended."""
        if self._reader is not None:
            self._take(self._reader.finish(is_cut=not is_complete))
        self._flush()
        self._output.finish(is_complete=is_complete)

    def usage(self, result: BatchResult) -> ResponseUsage:
        """Return the token counts of a job. Reasoning tokens are estimated from their share of the text."""
        share = self._num_reasoning / len(self.text) if self.text else 0.0
        return ResponseUsage.of(
            input_tokens=result.prompt_tokens,
            output_tokens=result.completion_tokens,
            cached_tokens=result.cached_tokens,
            reasoning_tokens=round(result.completion_tokens * share),
        )

    def _take(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            match event:
                case ContentText(text) | ReasoningText(text):
                    if isinstance(event, ReasoningText):
                        self._num_reasoning += len(text)
                        if not self._reading.includes_reasoning:
                            continue
                    self._add(type(event), text)
                case ToolCallStart(index, name):
                    self._flush()
                    if self._reading.includes_call(index):
                        self._kind = ToolCallArguments
                        self._output.call_started(name)
                case ToolCallArguments(index, text):
                    if self._reading.includes_call(index):
                        self._add(ToolCallArguments, text)

    def _add(self, kind: type[OutputEvent], text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind, self._piece = kind, 1
        self._pending += text
        start = 0
        while len(self._pending) - start >= self._piece:
            self._write(self._pending[start : start + self._piece])
            start += self._piece
            self._piece = min(2 * self._piece, _PIECE_CHARACTERS)
        self._pending = self._pending[start:]

    def _flush(self) -> None:
        if self._pending:
            piece, self._pending = self._pending, ""
            self._write(piece)

    def _write(self, piece: str) -> None:
        if self._kind is ContentText:
            self._output.content(piece)
        elif self._kind is ReasoningText:
            self._output.reasoning(piece)
        else:
            self._output.call_arguments(piece)


class JobWatch:
    """The subscriptions for one job, and the latest record that they brought.

    Attributes:
        changed: Done when there is something new; a new one after `take`.
        has_heard: Something has been heard, so the subscriptions work.
    """

    def __init__(self) -> None:
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_heard = False
        self._latest: BatchProgress | None = None
        self._subscriptions: list[Subscription] = []

    @property
    def is_subscribed(self) -> bool:
        """Whether it has subscriptions, which `close` ends."""
        return bool(self._subscriptions)

    async def start(self, nats: DirectClient, tenant: str, response_id: str) -> None:
        """Subscribe. Where that is impossible nothing is heard."""
        handlers = ((progress_subject, self._receive_record), (stored_subject, self._receive_end))
        with contextlib.suppress(*SEND_ERRORS):
            for subject, handler in handlers:
                self._subscriptions.append(await nats.subscribe_direct(subject(tenant, response_id), handler))

    def take(self, stream_seq: int) -> BatchProgress | None:
        """Return the newest record of the job with this number that has not been taken; None: ask NATS."""
        if self.changed.done():
            self.changed = asyncio.get_running_loop().create_future()
        record, self._latest = self._latest, None
        return record if record is not None and record.stream_seq == stream_seq else None

    async def close(self) -> None:
        """Subscribe to nothing any more."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await unsubscribe(subscription)

    def _receive_record(self, message: Msg) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            self._latest = msgspec.msgpack.decode(message.data, type=BatchProgress)
            self._note()

    def _receive_end(self, message: Msg) -> None:
        # The result itself is read from where it is stored.
        self._latest = None
        self._note()

    def _note(self) -> None:
        self.has_heard = True
        if not self.changed.done():
            self.changed.set_result(None)
