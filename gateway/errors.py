"""The one error type that becomes an HTTP answer, with OpenAI's four-key body."""

from __future__ import annotations

import math

import msgspec

from shared.errors import HeadraceError

# OpenAI's types. An error about a limit other than the number of requests sets its own.
_TYPES = {408: "timeout_error", 429: "requests"}


class ApiError(HeadraceError):
    """An answer other than success, for the client to read.

    Attributes:
        status: HTTP status code.
        param: Request field at fault, if one is.
        code: Stable machine-readable reason, e.g. `model_not_found`, `context_length_exceeded`, `queue_full`.
        retry_after_s: Value of the `Retry-After` header; always set for 429 and 503.
        headers: More response headers (`x-ratelimit-*`).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Describe the failure; `type` defaults to the one that belongs to the status."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    def body(self) -> bytes:
        """Return the JSON body: `error.{message,type,param,code}`, always all four."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the answer's own headers; `Retry-After` is rounded up, so that waiting that long is enough."""
        headers = [(b"content-type", b"application/json")]
        headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % whole_seconds(self.retry_after_s)))
        return headers


def whole_seconds(retry_after_s: float) -> int:
    """Return what `Retry-After` says of a time, which a text about it is to say, too: it is rounded up, 1 to 60."""
    return min(60, max(1, math.ceil(retry_after_s)))


def shutting_down() -> ApiError:
    """Return the error of requests that a gateway ends as it stops."""
    return ApiError(503, "The gateway is shutting down.", code="shutting_down", retry_after_s=1.0)


def model_not_found(model: str) -> ApiError:
    """Answer for a model that is unknown, or that the key may not use: the two are not told apart."""
    message = (
        f"The model `{model[:128]}` does not exist or you do not have access to it. `GET /v1/models` lists those that "
        "your key may use."
    )
    return ApiError(404, message, param="model", code="model_not_found")


def cannot_start(model: str) -> ApiError:
    """Return the error of a request for a model whose host cannot start it; the host tries again after a minute.

    The cause names files of the host, so only operators see it.
    """
    message = f"`{model}` cannot be started on its host; `headrace model ls` tells its operator why."
    return ApiError(503, message, code="model_failed", retry_after_s=60.0)
