"""`POST /v1/messages` and `/v1/messages/count_tokens`: a message, as one JSON body or as an event stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.auth import Principal
from gateway.anthropic.body import CountTokensBody, MessagesBody
from gateway.anthropic.dialect import ANTHROPIC, AnthropicError, BlockEvents, BlockList, event
from gateway.anthropic.parsing import parse_count_tokens, parse_messages
from gateway.api.answer import Answer, Asked, EventAnswer, StreamParts
from gateway.api.chat_answers import CONTEXT_FULL, is_context_full
from gateway.api.endpoint import Endpoint
from gateway.api.operation import Operation
from gateway.api.read_choice import ReadChoice
from gateway.api.routes import KeyRoute, RouteServices, json_response
from gateway.api.usage import UsageTotals
from gateway.generation import PLAIN_READING, OutputReading
from gateway.streams.event_stream import EventStream
from shared.messages import Delta, Finish


class AnthropicOutputDetails(Struct, forbid_unknown_fields=True):
    """Which of the output tokens were thinking."""

    thinking_tokens: int


class AnthropicUsage(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Token counts. Cached tokens of the prompt are not input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicOutputDetails | None = None


class AnthropicMessage(Struct, forbid_unknown_fields=True):
    """A message: blocks of the types `text`, `thinking` and `tool_use`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(Struct):
    """An event of a streamed message; its other fields depend on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


def new_message(model: str, token: str, prompt_tokens: int = 0) -> AnthropicMessage:
    """Return a message without content that has not stopped; `token` is that of its answer."""
    return AnthropicMessage(f"msg_{token}", "message", "assistant", model, [], None, None, usage(prompt_tokens, 0, 0))


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> AnthropicUsage:
    """Return the usage: cached tokens of the prompt are not input tokens."""
    return AnthropicUsage(prompt_tokens - cached_tokens, 0, cached_tokens, completion_tokens)


def usage_of(totals: UsageTotals) -> AnthropicUsage:
    """Return the usage of a complete message."""
    message_usage = usage(totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens)
    if totals.reasoning_tokens:
        message_usage.output_tokens_details = AnthropicOutputDetails(totals.reasoning_tokens)
    return message_usage


def stop_fields(finish: Finish, num_calls: int, max_tokens: int | None) -> dict[str, Any]:
    """Return why a message stopped that could have had `max_tokens`."""
    stop = finish.stop if isinstance(finish.stop, str) else None
    if finish.reason == "length":
        reason: str = CONTEXT_FULL if is_context_full(finish, max_tokens) else "max_tokens"
    elif num_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


class _MessageChoice(ReadChoice):
    """The only sink of a message: puts its text into blocks."""

    def __init__(self, answer: Answer, reading: OutputReading | None, blocks: BlockEvents | BlockList) -> None:
        super().__init__(answer, 0, reading or PLAIN_READING)
        self._blocks = blocks
        self._finish: Finish | None = None
        self.prompt_tokens = 0
        self.events: list[bytes] = []

    def deliver(self, delta: Delta) -> None:
        """Take note of the prompt's length, which a stream tells first."""
        if delta.prompt_tokens is not None:
            self.prompt_tokens = delta.prompt_tokens
        super().deliver(delta)

    def content(self, text: str) -> None:
        self._add(self._blocks.text(text))

    def reasoning(self, text: str) -> None:
        self._add(self._blocks.thinking(text))

    def call_started(self, index: int, name: str) -> None:
        self._add(self._blocks.call(name))

    def call_arguments(self, index: int, text: str) -> None:
        self._add(self._blocks.arguments(text))

    def delivered(self, finish: Finish | None) -> None:
        if finish is not None:
            self._finish = finish

    def stop_fields(self) -> dict[str, Any]:
        assert self._finish is not None, "the answer is complete"
        return stop_fields(self._finish, self.num_calls, self._answer.max_tokens)

    def _add(self, events: bytes | None) -> None:
        if events is not None:
            self.events.append(events)


class WholeMessage(Answer):
    """An answer as one message."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._model = asked.generation.name
        self._token = asked.stamp.token
        self._blocks = BlockList(asked.stamp.derived)
        self._choice = _MessageChoice(self, asked.generation.reading, self._blocks)
        self.sinks = [self._choice]

    def _complete(self) -> None:
        told = {"content": self._blocks.blocks(), **self._choice.stop_fields(), "usage": usage_of(self.usage)}
        self._respond(msgspec.json.encode(msgspec.structs.replace(new_message(self._model, self._token), **told)))


class StreamedMessage(EventAnswer):
    """An answer as the events of one message."""

    def __init__(self, asked: Asked, parts: StreamParts) -> None:
        super().__init__(asked, parts)
        self._choice = _StreamedChoice(self, self._stream, asked)
        self.sinks = [self._choice]

    def open(self) -> None:
        """Send a ping; the message itself begins with the length of its prompt, which is not known yet."""
        self._stream.send_now(ANTHROPIC.keep_alive)

    def _complete(self) -> None:
        delta = {"type": "message_delta", "delta": self._choice.stop_fields(), "usage": usage_of(self.usage)}
        self._stream.end(event(delta) + event({"type": "message_stop"}))


class _StreamedChoice(_MessageChoice):
    def __init__(self, answer: Answer, stream: EventStream, asked: Asked) -> None:
        self._events_of_blocks = BlockEvents(asked.stamp.derived)
        super().__init__(answer, asked.generation.reading, self._events_of_blocks)
        self._stream = stream
        self._model = asked.generation.name
        self._token = asked.stamp.token
        self._has_begun = False

    def delivered(self, finish: Finish | None) -> None:
        super().delivered(finish)
        is_first = not self._has_begun
        if is_first:
            self._has_begun = True
            message = new_message(self._model, self._token, self.prompt_tokens)
            self.events.insert(0, event({"type": "message_start", "message": message}))
        if finish is not None:
            self.events.append(self._events_of_blocks.close())
        if not self.events:
            return
        data = b"".join(self.events)
        self.events.clear()
        if is_first and finish is None:
            self._stream.send_now(data)
        else:
            self._stream.send(data)


class TokenCount(Struct, forbid_unknown_fields=True):
    """The tokens of a prompt."""

    input_tokens: int


class MessagesEndpoint(Endpoint):
    """Creates messages."""

    path = "/v1/messages"
    name = "messages"
    dialect = ANTHROPIC
    is_logged = True
    parse = staticmethod(parse_messages)

    def whole_answer(self, asked: Asked) -> Answer:
        """Return an answer as one message."""
        return WholeMessage(asked)

    def streamed_answer(self, asked: Asked, parts: StreamParts) -> Answer:
        """Return an answer as the events of one message."""
        return StreamedMessage(asked, parts)


def count_tokens_route(services: RouteServices) -> KeyRoute:
    """Return the route that counts the tokens of a prompt."""

    async def count(request: Request, principal: Principal) -> Response:
        model, call, images = await services.read_body(request, principal, parse_count_tokens)
        reply = await services.ask_tokenizer(principal, model, call, images)
        return json_response(TokenCount(len(reply.token_ids)))

    return KeyRoute("POST", "/v1/messages/count_tokens", count, ANTHROPIC)


OPERATIONS = (
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, in Anthropic's form.",
        AnthropicMessage,
        MessagesBody,
        AnthropicEvent,
        AnthropicError,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        TokenCount,
        CountTokensBody,
        error=AnthropicError,
    ),
)
