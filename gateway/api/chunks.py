"""The events of a streamed answer. What is the same in all chunks of a choice is encoded once, at its start.

Per token only the text is escaped, between a prefix and a suffix of bytes: no dictionary and no JSON encoder sees it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from os import urandom
from typing import Any

import msgspec
from msgspec import Struct

from gateway.api.choice_fields import (
    call_fields,
    chat_logprobs,
    completion_logprobs,
    first_token_name,
    reasoning_fields,
)
from gateway.api.details import ChoiceDetails
from gateway.generation import Generation, Kind
from gateway.streams.dialect import one_line, server_sent_event
from shared.messages import Delta, TokenLogprob

encode_json = msgspec.json.Encoder().encode

_MARKER = "\x00text\x00"


def encode_text(text: str) -> bytes:
    """Return a text as JSON for an event."""
    return encode_json(text) if text.isascii() else one_line(encode_json(text))


def usage_event(identity: AnswerIdentity, usage: dict[str, Any]) -> bytes:
    """Return the last chunk of a stream whose client asked for usage."""
    return _event(identity.fields(streamed=True) | {"choices": [], "usage": usage})


class AnswerIdentity(Struct, frozen=True):
    """Id, format, model and time of an answer; `created` is in Unix seconds, `fingerprint` names the model's files."""

    id: str
    kind: Kind
    model: str
    created: int
    fingerprint: str | None = None

    @classmethod
    def new(cls, generation: Generation, fingerprint: str | None = None) -> AnswerIdentity:
        """Identify a new answer; its id has the prefix that its endpoint's clients know."""
        prefix = "chatcmpl-" if generation.kind == "chat" else "cmpl-"
        return cls(prefix + urandom(12).hex(), generation.kind, generation.model, int(time.time()), fingerprint)

    def fields(self, streamed: bool) -> dict[str, Any]:
        """Return the leading fields of the JSON object."""
        name = "text_completion" if self.kind == "completion" else "chat.completion"
        if streamed and self.kind == "chat":
            name += ".chunk"
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class ChoiceChunks:
    """Encoder of one choice's chunks.

    Attributes:
        prefix: Bytes before the JSON string of the text, in a chunk that has text alone; empty before `prepare`.
        suffix: Bytes after it.
        details: What chunks report besides, so that none has text alone; None for nothing.
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
        """Encode nothing yet.

        Args:
            identity: What all chunks begin with.
            index: Of the choice.
            with_usage: Put `usage: null` in every chunk, as clients that asked for it expect.
            details: As the attribute.
            is_function_call: Calls are told in the form before tools.
        """
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
            self.prefix, suffix = self._chunk(_MARKER).split(encode_json(_MARKER))
            self.suffix = _shared(suffix)
            self.details = details

    def opening(self, content: str | None = "") -> bytes:
        """Return the chunk before the first text: chat says who speaks, completions say nothing.

        The content is null before a call.
        """
        if self._identity.kind == "completion":
            return b""
        return self._delta({"role": "assistant", "content": content})

    def content(self, delta: Delta) -> bytes:
        """Return the chunk with a delta's text and log probabilities, or nothing if it has neither."""
        if not (delta.logprobs or delta.prompt_logprobs):
            if self.details is not None:
                return self._chunk(delta.text) if delta.text else b""
            if not delta.text:
                return b""
            return self._filled(delta.text)
        return self._chunk(delta.text, self._logprobs(delta))

    def text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return a chunk of content that was read; `logprobs` are those of the tokens up to and with it."""
        return self._filled(text) if self._is_plain(logprobs) else self._delta({"content": text}, logprobs)

    def reasoning(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return a chunk of reasoning."""
        if not self._is_plain(logprobs):
            return self._delta(reasoning_fields(text), logprobs)
        self._reasoning = self._reasoning or self._template(reasoning_fields(_MARKER))
        return encode_text(text).join(self._reasoning)

    def call(self, index: int, call_id: str, name: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return the chunk that opens a call."""
        if self.details is None:
            self._arguments.append(self._template(self._call_delta(index, {"arguments": _MARKER})))
        if self._is_function_call:
            return self._delta({"function_call": {"name": name, "arguments": ""}}, logprobs)
        return self._delta({"tool_calls": [{"index": index} | call_fields(call_id, name, "")]}, logprobs)

    def arguments(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return a chunk of a call's arguments."""
        if self._is_plain(logprobs):
            return encode_text(text).join(self._arguments[index])
        return self._delta(self._call_delta(index, {"arguments": text}), logprobs)

    def finish(self, reason: str, more: Mapping[str, str], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Return the chunk that says why the choice ended; `more` stands beside the reason."""
        body: dict[str, Any] = {"text": ""} if self._identity.kind == "completion" else {"delta": {}}
        told = chat_logprobs(logprobs) if logprobs else None
        return self._encode(body | {"logprobs": told, "finish_reason": reason, **more})

    def _is_plain(self, logprobs: Sequence[TokenLogprob]) -> bool:
        """Say whether a chunk differs from others of its kind in its text alone."""
        return not logprobs and self.details is None

    def _filled(self, text: str) -> bytes:
        self.prepare()
        return self.prefix + encode_text(text) + self.suffix

    def _call_delta(self, index: int, function: dict[str, str]) -> dict[str, Any]:
        if self._is_function_call:
            return {"function_call": function}
        return {"tool_calls": [{"index": index, "function": function}]}

    def _template(self, delta: dict[str, Any]) -> list[bytes]:
        return self._delta(delta).split(encode_json(_MARKER))

    def _delta(self, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        told = chat_logprobs(logprobs) if logprobs else None
        return self._encode({"delta": delta, "logprobs": told, "finish_reason": None})

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        if self._identity.kind == "chat":
            return chat_logprobs(delta.logprobs or ())
        prompt = delta.prompt_logprobs or ()
        entries: list[TokenLogprob | None] = [*prompt, *(delta.logprobs or ())]
        first = first_token_name(delta) if prompt else ""
        logprobs = completion_logprobs(entries, self._offset, first)
        self._offset += sum(map(len, logprobs["tokens"]))
        return logprobs

    def _chunk(self, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        body = {"text": text} if self._identity.kind == "completion" else {"delta": {"content": text}}
        return self._encode(body | {"logprobs": logprobs, "finish_reason": None})

    def _encode(self, choice: dict[str, Any]) -> bytes:
        choice = {"index": self._index} | choice
        usage: dict[str, Any] = {"usage": None} if self._with_usage else {}
        details = self.details
        if details is None:
            return _event(self._identity.fields(streamed=True) | {"choices": [choice]} | usage)
        choice |= details.take_choice_fields()
        so_far = details.usage_so_far()
        if so_far is not None:
            usage = {"usage": so_far}
        fields = self._identity.fields(streamed=True) | {"choices": [choice]} | usage
        return _event(fields | details.take_answer_fields())


@lru_cache(maxsize=64)
def _shared(suffix: bytes) -> bytes:
    """Return one object for all that are equal: thousands of streams have the same few, and each token reads one."""
    return suffix


def _event(fields: dict[str, Any]) -> bytes:
    return server_sent_event(encode_json(fields))
