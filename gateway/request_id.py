"""The id that every answer carries in `x-request-id`, for the routes that answer through Starlette."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send


def new_request_id() -> str:
    """Return a fresh id."""
    return f"req_{secrets.token_hex(12)}"


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

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", new_request_id().encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)
