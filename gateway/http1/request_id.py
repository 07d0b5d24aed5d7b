"""The id that every answer carries in `x-request-id`, and that names a request in every log line down to the engine's.

A client may choose it, so that its own logs agree with ours. It identifies nothing: wire requests have ids of our own
that nobody can guess, so two clients with one id do each other no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from os import urandom

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
# Anthropic's clients, which say which version of its API they speak, read the id under another name.
_ANTHROPIC_VERSION, _ANTHROPIC_HEADER = b"anthropic-version", b"request-id"
# What is safe in headers, log lines and URLs alike.
_VALID = re.compile(rb"[A-Za-z0-9._:@+=/-]{1,128}")


def new_request_id() -> str:
    """Return a fresh id."""
    return "req_" + urandom(12).hex()


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the id that a client has chosen, or a fresh one where it chose none, several, or one that will not do."""
    chosen = [value for name, value in headers if name == HEADER]
    if len(chosen) == 1 and _VALID.fullmatch(chosen[0]):
        return chosen[0].decode()
    return new_request_id()


def id_header(headers: Iterable[tuple[bytes, bytes]] = ()) -> tuple[bytes, bytes]:
    """Return the header that names a request in its answer; `headers` are those of the request, as far as known."""
    return HEADER, request_id_of(headers).encode()


class RequestIdMiddleware:
    """Adds `x-request-id` to each answer of an application. Plain ASGI: it wraps `send` and nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [id_header(scope["headers"])]
        if any(name == _ANTHROPIC_VERSION for name, _ in scope["headers"]):
            headers.append((_ANTHROPIC_HEADER, headers[0][1]))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app(scope, receive, send_with_id)
