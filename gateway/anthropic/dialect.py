"""Anthropic's errors, and the events of its streams."""

from __future__ import annotations

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
    """What is at fault, for the client's program."""

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


def error_fields(error: ApiError) -> AnthropicError:
    """Return an error as the object that its body and its event hold."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    reason = _REASONS.get(error.param or "") if error.code == "unsupported_parameter" else None
    details = UNSET if reason is None else AnthropicErrorReason(reason)
    return AnthropicError("error", AnthropicErrorDetails(kind, error.message, details))


def error_body(error: ApiError) -> bytes:
    """Return the body of an error."""
    return _encode(error_fields(error))


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
