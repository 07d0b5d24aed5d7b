"""The events of a streamed answer. What is the same in all chunks of a choice is encoded once, at its start.

Per token only the text is escaped, between a prefix and a suffix of bytes: no dictionary and no JSON encoder sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from gateway.api.details import ChoiceDetails
from gateway.api.identity import AnswerIdentity
from gateway.api.logprobs import chat_logprobs, completion_logprobs, first_token_name
from gateway.streams.dialect import one_line, server_sent_event
from shared.messages import Delta, TokenLogprob

encode_json = msgspec.json.Encoder().encode


def encode_text(text: str) -> bytes:
    """Return a text as JSON for an event."""
    return encode_json(text) if text.isascii() else one_line(encode_json(text))


def usage_event(identity: AnswerIdentity, usage: dict[str, Any]) -> bytes:
    """Return the last chunk of a stream whose client asked for usage."""
    return _event(identity.fields(streamed=True) | {"choices": [], "usage": usage})


class ChoiceChunks:
    """Encoder of one choice's chunks.

    Attributes:
        prefix: Bytes before the JSON string of the text, in a chunk that has text alone; empty before `prepare`.
        suffix: Bytes after it.
        details: What chunks report besides, so that none has text alone; None for nothing.
    """

    __slots__ = ("_identity", "_index", "_offset", "_with_usage", "details", "prefix", "suffix")

    def __init__(
        self, identity: AnswerIdentity, index: int, with_usage: bool, details: ChoiceDetails | None = None
    ) -> None:
        """Encode nothing yet. `with_usage` puts `usage: null` in every chunk, as clients that asked for it expect."""
        self.details = details
        self._identity = identity
        self._index = index
        self._with_usage = with_usage
        self._offset = 0
        self.prefix = self.suffix = b""

    def prepare(self) -> None:
        """Encode the template, unless that has been done: before the first text comes, or with it."""
        if not self.prefix:
            details, self.details = self.details, None
            marker = "\x00text\x00"
            self.prefix, suffix = self._chunk(marker).split(encode_json(marker))
            self.suffix = _shared(suffix)
            self.details = details

    def opening(self) -> bytes:
        """Return the chunk before the first text: chat says who speaks, completions say nothing."""
        if self._identity.kind == "completion":
            return b""
        return self._encode({"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})

    def content(self, delta: Delta) -> bytes:
        """Return the chunk with a delta's text and log probabilities, or nothing if it has neither."""
        if not (delta.logprobs or delta.prompt_logprobs):
            if self.details is not None:
                return self._chunk(delta.text) if delta.text else b""
            if not delta.text:
                return b""
            self.prepare()
            return self.prefix + encode_text(delta.text) + self.suffix
        return self._chunk(delta.text, self._logprobs(delta))

    def finish(self, reason: str, more: Mapping[str, str]) -> bytes:
        """Return the chunk that says why the choice ended; `more` stands beside the reason."""
        body: dict[str, Any] = {"text": ""} if self._identity.kind == "completion" else {"delta": {}}
        return self._encode(body | {"logprobs": None, "finish_reason": reason, **more})

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
