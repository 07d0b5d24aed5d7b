"""The events of a streamed answer. The bytes that all chunks of a choice have in common are encoded once, at its start.

Per token only the text is escaped, between a prefix and a suffix of bytes: no struct and no JSON encoder sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.chat_answers import (
    AnswerIdentity,
    CallFunctionDelta,
    ChatChunkChoice,
    CompletionChoice,
    FinishReason,
    MessageDelta,
    StopReason,
    ToolCallDelta,
    UsageAnswer,
    chat_logprobs,
    completion_logprobs,
)
from gateway.api.details import ChoiceDetails
from gateway.streams.dialect import one_line, server_sent_event
from shared.messages import TokenLogprob

Entries = Sequence[TokenLogprob | None]

encode_json = msgspec.json.Encoder().encode

_MARKER = "\x00text\x00"


def encode_text(text: str) -> bytes:
    """Return a text as JSON for an event."""
    return encode_json(text) if text.isascii() else one_line(encode_json(text))


def usage_event(identity: AnswerIdentity, usage: UsageAnswer) -> bytes:
    """Return the last chunk of a stream whose client asked for usage."""
    return server_sent_event(encode_json(identity.chunk([], usage)))


class ChoiceChunks:
    """Encoder of one choice's chunks.

    Attributes:
        prefix: Bytes before the JSON string of the text, in a chunk that has text alone; empty before `prepare`.
        suffix: Bytes after it.
        details: Reported besides text, so that no chunk has text alone; None for nothing.
    """

    __slots__ = (
        "_arguments",
        "_identity",
        "_index",
        "_is_function_call",
        "_offset",
        "_reasoning",
        "_with_usage",
        "details",
        "prefix",
        "suffix",
    )

    def __init__(
        self,
        identity: AnswerIdentity,
        index: int,
        with_usage: bool,
        details: ChoiceDetails | None = None,
        *,
        is_function_call: bool = False,
    ) -> None:
        self.details = details
        self._is_function_call = is_function_call
        self._reasoning: list[bytes] = []
        # The template of the arguments of each call, in their order.
        self._arguments: list[list[bytes]] = []
        self._identity = identity
        self._index = index
        self._with_usage = with_usage
        self._offset = 0
        self.prefix = self.suffix = b""

    def prepare(self) -> None:
        """Encode the template, unless that has been done: before the first text comes, or with it."""
        if not self.prefix:
            details, self.details = self.details, None
            self.prefix, suffix = self._content(_MARKER).split(encode_json(_MARKER))
            self.suffix = _shared(suffix)
            self.details = details

    def opening(self, content: str | None = "") -> bytes:
        """Return the chunk before the first text: chat says who speaks, completions say nothing.

        The content is null before a call.
        """
        if self._identity.kind == "completion":
            return b""
        return self._delta(MessageDelta("assistant", content))

    def text(self, text: str, logprobs: Entries, first_token: str = "") -> bytes:
        """Return a chunk of content, with the log probabilities since the last; `first_token` names a None."""
        if not logprobs and self.details is None:
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
        call_id = self._identity.call_id(self._index, index)
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
        if self._identity.kind == "completion":
            return self._encode(CompletionChoice(self._index, "", None, reason, stop))
        told = chat_logprobs(logprobs) if logprobs else None
        return self._encode(ChatChunkChoice(self._index, MessageDelta(), told, reason, stop))

    def _call_delta(self, call: ToolCallDelta, arguments: str, name: str | UnsetType = UNSET) -> MessageDelta:
        function = CallFunctionDelta(name, arguments)
        if self._is_function_call:
            return MessageDelta(function_call=function)
        call.function = function
        return MessageDelta(tool_calls=[call])

    def _template(self, delta: MessageDelta) -> list[bytes]:
        return self._delta(delta).split(encode_json(_MARKER))

    def _content(self, text: str, logprobs: Entries = (), first_token: str = "") -> bytes:
        if self._identity.kind == "chat":
            return self._delta(MessageDelta(content=text), logprobs)
        told = completion_logprobs(logprobs, self._offset, first_token) if logprobs else None
        if told is not None:
            self._offset += sum(map(len, told.tokens))
        return self._encode(CompletionChoice(self._index, text, told, None))

    def _delta(self, delta: MessageDelta, logprobs: Entries = ()) -> bytes:
        told = chat_logprobs(logprobs) if logprobs else None
        return self._encode(ChatChunkChoice(self._index, delta, told, None))

    def _encode(self, choice: ChatChunkChoice | CompletionChoice) -> bytes:
        answer, details = self._identity.chunk([choice], None if self._with_usage else UNSET), self.details
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
