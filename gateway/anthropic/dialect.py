"""Anthropic's errors, and the events of its streams."""

from __future__ import annotations

from typing import Any

import msgspec

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
_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}

_encode = msgspec.json.Encoder().encode


def event(fields: dict[str, Any]) -> bytes:
    """Return an event of a stream; its name is the `type` of its data."""
    return server_sent_event(_encode(fields), fields["type"])


def error_fields(error: ApiError) -> dict[str, Any]:
    """Return an error as the object that its body and its event hold."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    fields: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == "unsupported_parameter" and error.param in _DETAILS:
        fields["details"] = _DETAILS[error.param]
    return {"type": "error", "error": fields}


def error_body(error: ApiError) -> bytes:
    """Return the body of an error."""
    return _encode(error_fields(error))


def error_event(error: ApiError) -> bytes:
    """Return the event of an error in mid-stream."""
    return event(error_fields(error))


ANTHROPIC = Dialect(
    error_body,
    error_event,
    end_of_stream=b"",
    keep_alive=event({"type": "ping"}),
    id_headers=(b"request-id",),
    client_header=b"anthropic-version",
)
