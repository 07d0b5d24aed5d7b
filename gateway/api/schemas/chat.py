"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.api.schemas.decoding import (
    decode_body,
    estimate_tokens,
    require_text,
)
from gateway.api.schemas.parameters import (
    CommonBody,
    check_names,
    check_sequences,
    check_stream_options,
    is_deterministic,
    to_sampling,
)
from gateway.api.schemas.refusals import invalid_value, unsupported_parameter
from gateway.api.schemas.row import Kind
from gateway.generation import Generation, Prompt
from shared.bounds import MAX_MESSAGES, MAX_OUTPUT_TOKENS, NumLogprobs
from shared.conversation import ChatMessage

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# What a chat template adds around one message.
_TOKENS_PER_MESSAGE = 4


class ContentPart(Struct, forbid_unknown_fields=True):
    """One part of a message's content; only text parts are supported."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None


class PredictionBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the client expects the answer to resemble: a file before an edit, for instance."""

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)]


class MessageBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """One message as the client wrote it."""

    role: Annotated[str, Meta(max_length=64)]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None


Messages = Annotated[list[MessageBody], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(CommonBody, kw_only=True):
    """The whole body."""

    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    prediction: PredictionBody | None = None


_decoder = msgspec.json.Decoder(ChatBody)


def parse_chat(body: bytes, allow_unknown: bool = False) -> Generation:
    """Turn a chat completion body into what is to be generated; `allow_unknown` is as in `decode_body`.

    Raises:
        ApiError: 400; `param` names the field at fault.
    """
    chat = decode_body(_decoder, Kind.CHAT, body, allow_unknown)
    check_names(chat)
    n = chat.n or 1
    check_sequences(1, n)
    logprobs = _num_logprobs(chat)
    messages = flatten_messages(chat.messages)
    return Generation(
        kind="chat",
        model=chat.model,
        prompts=(Prompt(estimated_tokens=estimate_messages(messages), messages=messages),),
        n=n,
        sampling=to_sampling(chat, _max_tokens(chat), logprobs, None),
        deterministic=is_deterministic(chat),
        stream=bool(chat.stream),
        include_usage=check_stream_options(chat),
        priority=chat.priority or 0,
        timeout_s=chat.timeout,
        prediction=None if chat.prediction is None else _content_text(chat.prediction.content, "prediction.content"),
    )


def flatten_messages(messages: list[MessageBody]) -> tuple[ChatMessage, ...]:
    """Return the messages with their content as plain text.

    Raises:
        ApiError: 400; a role is unknown, or a content is missing or is not text.
    """
    return tuple(_flatten(message, f"messages.[{index}]") for index, message in enumerate(messages))


def estimate_messages(messages: tuple[ChatMessage, ...]) -> int:
    """Estimate the prompt tokens of a conversation from its lengths."""
    return sum(estimate_tokens(message.content) + _TOKENS_PER_MESSAGE for message in messages)


def _flatten(message: MessageBody, where: str) -> ChatMessage:
    if message.role not in ROLES:
        raise invalid_value(f"{where}.role", f"'{where}.role' must be one of {', '.join(ROLES)}.")
    if message.content is None:
        raise invalid_value(f"{where}.content", f"'{where}.content' is required: a string or a list of text parts.")
    name = None if message.name is None else require_text(f"{where}.name", message.name)
    return ChatMessage(role=message.role, content=_content_text(message.content, f"{where}.content"), name=name)


def _content_text(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return require_text(where, content)
    texts = []
    for part in content:
        if part.type != "text":
            raise unsupported_parameter(where, f"'{where}' has a part of type '{part.type}'; only 'text' is supported.")
        if part.text is None:
            raise invalid_value(where, f"'{where}' has a text part without 'text'.")
        texts.append(part.text)
    return require_text(where, "".join(texts))


def _max_tokens(chat: ChatBody) -> int | None:
    if chat.max_tokens == 0:
        raise invalid_value("max_tokens", "'max_tokens' is invalid: expected integer >= 1.")
    if chat.max_completion_tokens is not None:
        return chat.max_completion_tokens
    return chat.max_tokens


def _num_logprobs(chat: ChatBody) -> int | None:
    if chat.logprobs:
        return chat.top_logprobs or 0
    if chat.top_logprobs:
        raise invalid_value("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return None
