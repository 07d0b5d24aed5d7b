"""The chunks of a streamed chat answer whose text is read: content, reasoning and calls of tools.

As in `chunks`, what is the same in all pieces of one kind is encoded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.chunks import ChoiceChunks, encode_json, encode_text
from gateway.api.details import ChoiceDetails
from gateway.api.identity import AnswerIdentity
from gateway.api.logprobs import chat_logprobs
from gateway.api.tool_calls import call_fields, reasoning_fields
from shared.messages import TokenLogprob

_MARKER = "\x00text\x00"


class ReadChunks(ChoiceChunks):
    """Encoder of one choice's chunks. `logprobs` are those of the tokens up to and with a chunk's text."""

    __slots__ = ("_arguments", "_content", "_is_function_call", "_reasoning")

    def __init__(
        self,
        identity: AnswerIdentity,
        index: int,
        with_usage: bool,
        is_function_call: bool,
        details: ChoiceDetails | None = None,
    ) -> None:
        """Encode the templates of text and of reasoning; with `details` there are none."""
        super().__init__(identity, index, with_usage)
        self._is_function_call = is_function_call
        self._content = self._template({"content": _MARKER})
        self._reasoning = self._template(reasoning_fields(_MARKER))
        self.details = details
        # Of each call, in their order.
        self._arguments: list[list[bytes]] = []

    def opening_of(self, content: str | None) -> bytes:
        """Return the chunk that says who speaks; the content is null before a call."""
        return self._delta({"role": "assistant", "content": content}, ())

    def text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return a chunk of content."""
        if self._is_plain(logprobs):
            return self._fill(self._content, text)
        return self._delta({"content": text}, logprobs)

    def reasoning(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return a chunk of reasoning."""
        if self._is_plain(logprobs):
            return self._fill(self._reasoning, text)
        return self._delta(reasoning_fields(text), logprobs)

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
            return self._fill(self._arguments[index], text)
        return self._delta(self._call_delta(index, {"arguments": text}), logprobs)

    def end(self, reason: str, logprobs: Sequence[TokenLogprob], more: Mapping[str, str]) -> bytes:
        """Return the chunk that says why the choice ended; `more` stands beside the reason."""
        fields = chat_logprobs(logprobs) if logprobs else None
        return self._encode({"delta": {}, "logprobs": fields, "finish_reason": reason, **more})

    def _is_plain(self, logprobs: Sequence[TokenLogprob]) -> bool:
        """Say whether a chunk differs from others of its kind in its text alone."""
        return not logprobs and self.details is None

    def _call_delta(self, index: int, function: dict[str, str]) -> dict[str, Any]:
        if self._is_function_call:
            return {"function_call": function}
        return {"tool_calls": [{"index": index, "function": function}]}

    def _delta(self, delta: dict[str, Any], logprobs: Sequence[TokenLogprob]) -> bytes:
        fields = chat_logprobs(logprobs) if logprobs else None
        return self._encode({"delta": delta, "logprobs": fields, "finish_reason": None})

    def _template(self, delta: dict[str, Any]) -> list[bytes]:
        return self._delta(delta, ()).split(encode_json(_MARKER))

    @staticmethod
    def _fill(template: list[bytes], text: str) -> bytes:
        return encode_text(text).join(template)
