"""Anthropic's errors and events, and the blocks of a message's content, streamed or whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.errors import ApiError
from gateway.streams.dialect import Dialect, server_sent_event

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# By the parameter at fault: what a client needs to go on without it.
_REASONS = {"thread": "thread_unsupported_request"}

_encode = msgspec.json.Encoder().encode


class AnthropicErrorReason(Struct, forbid_unknown_fields=True):
    """The reason of the error, machine-readable."""

    error_code: str


class AnthropicErrorDetails(Struct, forbid_unknown_fields=True):
    """What went wrong."""

    type: str
    message: str
    details: AnthropicErrorReason | UnsetType = UNSET


class AnthropicError(Struct, forbid_unknown_fields=True):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: AnthropicErrorDetails


def event(fields: dict[str, Any]) -> bytes:
    """Return an event of a stream; its name is the `type` of its data."""
    return server_sent_event(_encode(fields), fields["type"])


def error_body(error: ApiError) -> bytes:
    """Return the body of an error."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    reason = _REASONS.get(error.param or "") if error.code == "unsupported_parameter" else None
    details = UNSET if reason is None else AnthropicErrorReason(reason)
    return _encode(AnthropicError("error", AnthropicErrorDetails(kind, error.message, details)))


def error_event(error: ApiError) -> bytes:
    """Return the event of an error in mid-stream."""
    return server_sent_event(error_body(error), "error")


ANTHROPIC = Dialect(
    error_body,
    error_event,
    end_of_stream=b"",
    keep_alive=event({"type": "ping"}),
    id_headers=(b"request-id",),
    client_header=b"anthropic-version",
)


_decode = msgspec.json.Decoder().decode

# Clients give back only thinking that has a signature, and take an empty one for none. Nothing is signed here.
_SIGNATURE = "unsigned"

_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def tool_use(name: str, digits: str) -> dict[str, Any]:
    """Return the block of a call whose arguments follow, with an id of these digits."""
    return {"type": "tool_use", "id": f"toolu_{digits}", "name": name, "input": {}}


class BlockEvents:
    """Events of the blocks of a stream. One block is open at a time, and each has a number."""

    def __init__(self, digits: Callable[[int], str]) -> None:
        self._digits = digits
        self._index = -1
        self._open: str | None = None

    def text(self, text: str) -> bytes:
        """Return the events of more text."""
        return self._within("text") + self._delta({"type": "text_delta", "text": text})

    def thinking(self, text: str) -> bytes:
        """Return the events of more thinking."""
        return self._within("thinking") + self._delta({"type": "thinking_delta", "thinking": text})

    def call(self, name: str) -> bytes:
        """Return the events of a call that begins."""
        return self.close() + self._start(tool_use(name, self._digits(self._index + 1)))

    def arguments(self, text: str) -> bytes:
        """Return the event of more of a call's arguments."""
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> bytes:
        """Return the end of the block that is open, if one is."""
        if self._open is None:
            return b""
        is_thinking, self._open = self._open == "thinking", None
        signature = self._delta({"type": "signature_delta", "signature": _SIGNATURE}) if is_thinking else b""
        return signature + event({"type": "content_block_stop", "index": self._index})

    def _within(self, kind: str) -> bytes:
        return b"" if self._open == kind else self.close() + self._start(_EMPTY[kind])

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._open = block["type"]
        return event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})


class BlockList:
    """Collects the blocks of a whole message."""

    def __init__(self, digits: Callable[[int], str]) -> None:
        self._digits = digits
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []

    def text(self, text: str) -> None:
        """Take more text."""
        self._add("text", text)

    def thinking(self, text: str) -> None:
        """Take more thinking."""
        self._add("thinking", text)

    def call(self, name: str) -> None:
        """Learn that a call begins."""
        self._complete()
        self._blocks.append(tool_use(name, self._digits(len(self._blocks))))

    def arguments(self, text: str) -> None:
        """Take more of a call's arguments."""
        self._texts.append(text)

    def blocks(self) -> list[dict[str, Any]]:
        """Return all blocks; nothing follows. A call that was cut off in its arguments has an empty input."""
        self._complete()
        return self._blocks

    def _add(self, kind: str, text: str) -> None:
        if not self._blocks or self._blocks[-1]["type"] != kind:
            self._complete()
            self._blocks.append(dict(_EMPTY[kind]))
        self._texts.append(text)

    def _complete(self) -> None:
        if not self._blocks:
            return
        block, text = self._blocks[-1], "".join(self._texts)
        self._texts.clear()
        if block["type"] == "tool_use":
            block["input"] = {}
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                block["input"] = _decode(text)
        else:
            block[block["type"]] = text
            if block["type"] == "thinking":
                block["signature"] = _SIGNATURE
