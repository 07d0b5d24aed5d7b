"""The chunks of a streamed chat answer whose text is read: content, reasoning and calls of tools.

As in `chunks`, what is the same in all pieces of one kind is encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.api.chunks import ChoiceChunks, encode_json
from gateway.api.identity import AnswerIdentity
from gateway.api.logprobs import chat_logprobs
from gateway.api.tool_calls import call_fields, reasoning_fields
from shared.messages import TokenLogprob

_MARKER = "\x00text\x00"


class ReadChunks(ChoiceChunks):
    """Encoder of one choice's chunks. `logprobs` are those of the tokens up to and with a chunk's text."""

    __slots__ = ("_arguments", "_content", "_is_function_call", "_reasoning")

    def __init__(self, identity: AnswerIdentity, index: int, with_usage: bool, is_function_call: bool) -> None:
        """Encode the templates of text and of reasoning."""
        super().__init__(identity, index, with_usage)
        self._is_function_call = is_function_call
        self._content = self._template({"content": _MARKER})
        self._reasoning = self._template(reasoning_fields(_MARKER))
        # Of each call, in their order.
        self._arguments: list[list[bytes]] = []

    def opening_of(self, content: str | None) -> bytes:
        """Return the chunk that says who speaks; the content is null before a call."""
        return self._delta({"role": "assistant", "content": content}, ())

    def text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return a chunk of content."""
        return self._fill(self._content, text) if not logprobs else self._delta({"content": text}, logprobs)

    def reasoning(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return a chunk of reasoning."""
        return self._fill(self._reasoning, text) if not logprobs else self._delta(reasoning_fields(text), logprobs)

    def call(self, index: int, call_id: str, name: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return the chunk that opens a call."""
        assert index == len(self._arguments)
        self._arguments.append(self._template(self._call_delta(index, {"arguments": _MARKER})))
        if self._is_function_call:
            return self._delta({"function_call": {"name": name, "arguments": ""}}, logprobs)
        return self._delta({"tool_calls": [{"index": index} | call_fields(call_id, name, "")]}, logprobs)

    def arguments(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return a chunk of a call's arguments."""
        if not logprobs:
            return self._fill(self._arguments[index], text)
        return self._delta(self._call_delta(index, {"arguments": text}), logprobs)

    def end(self, reason: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return the chunk that says why the choice ended."""
        return self._delta({}, logprobs, reason)

    def _call_delta(self, index: int, function: dict[str, str]) -> dict[str, Any]:
        if self._is_function_call:
            return {"function_call": function}
        return {"tool_calls": [{"index": index, "function": function}]}

    def _delta(self, delta: dict[str, Any], logprobs: Sequence[TokenLogprob], reason: str | None = None) -> bytes:
        fields = chat_logprobs(logprobs) if logprobs else None
        return self._encode({"delta": delta, "logprobs": fields, "finish_reason": reason})

    def _template(self, delta: dict[str, Any]) -> list[bytes]:
        return self._delta(delta, ()).split(encode_json(_MARKER))

    @staticmethod
    def _fill(template: list[bytes], text: str) -> bytes:
        return encode_json(text).join(template)
