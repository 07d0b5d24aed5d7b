"""Exchanges where another server runs the application: the body comes by ASGI's `receive`, the answer leaves by `send`.

Our own server passes its exchange on in the scope (`gateway.http1.handlers`), and nothing here is used. Under another
one, limits and deadlines of connections are that server's; bodies on their way in are bounded as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any

from starlette.types import Message, Receive, Send

from gateway.http1.body import BodyBudget, ClientGoneError, RequestBody
from gateway.http1.exchange import Exchange, Headers
from gateway.http1.head import RequestHead

# Unsent bytes from which on a stream holds its own back, and the time that a client has for the end of a cut one.
MAX_UNSENT_BYTES = 64 << 10
CLOSE_TIMEOUT_S = 3.0


class AsgiExchange(Exchange):
    """An exchange made of `receive` and `send`. Use as `async with`; the end waits until everything is sent."""

    __slots__ = ("_pipe",)

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send, budget: BodyBudget) -> None:
        """Answer one request of another server, whose body counts against `budget`."""
        self._pipe = _Pipe(self, receive, send, _client(scope))
        super().__init__(self._pipe, _head(scope), RequestBody(self._pipe.begin_to_receive, budget))
        # The server frames the body.
        self._chunked = False

    async def __aenter__(self) -> AsgiExchange:
        """Begin to send."""
        self._pipe.begin_to_send()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until everything is sent; an answer that is not complete is left so, and the server cuts it."""
        await self._pipe.settle(CLOSE_TIMEOUT_S if self._closes or kind is not None else None)

    def respond(self, status: int, headers: Headers, body: bytes, length: int | None = None) -> None:
        """Send a whole response; to HEAD `length` is that of the body that GET would have."""
        if self.closed or not self._begin(status):
            return
        framing = (b"content-length", b"%d" % (len(body) if length is None else length))
        self._pipe.begin_response(status, [*self._headers(headers), framing])
        self._pipe.write(b"" if self.head.method == "HEAD" else body)
        self._complete()

    def start(self, status: int, headers: Headers, length: int | None = None) -> None:
        """Begin a response of `length` bytes, None if unknown."""
        if not self.closed and self._begin(status):
            framing = [] if length is None else [(b"content-length", b"%d" % length)]
            self._pipe.begin_response(status, [*self._headers(headers), *framing])


class _Pipe(asyncio.WriteTransport):
    """An exchange's connection: bytes go out in the turn of the loop in which they are written."""

    default_headers: Headers = ()
    must_close = False

    def __init__(self, exchange: AsgiExchange, receive: Receive, send: Send, client: tuple[str, int] | None) -> None:
        super().__init__()
        self.client = client
        self._exchange = exchange
        self._receive = receive
        self._send = send
        self._response: Message | None = None
        self._unsent = bytearray()
        self._is_last = False
        self._is_aborted = False
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None

    @property
    def transport(self) -> asyncio.WriteTransport:
        """Where the answer is written."""
        return self

    def begin_to_receive(self) -> None:
        self._wanted.set()
        if self._receiving is None:
            self._receiving = asyncio.create_task(self._receive_forever())

    def begin_to_send(self) -> None:
        self._sending = asyncio.create_task(self._send_all())

    def begin_response(self, status: int, headers: Headers) -> None:
        self._response = {"type": "http.response.start", "status": status, "headers": [*headers]}

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._unsent += data
        self._changed.set()
        if len(self._unsent) > MAX_UNSENT_BYTES and self._exchange.paused_since is None:
            self._exchange.pause(asyncio.get_running_loop().time())

    def answered(self, *, close: bool) -> None:
        self._is_last = True
        self._changed.set()

    def is_closing(self) -> bool:
        return self._is_aborted

    def abort(self) -> None:
        self._is_aborted = True
        if self._sending is not None:
            self._sending.cancel()

    async def settle(self, timeout_s: float | None) -> None:
        """Wait until everything is sent, or the time is over; then end."""
        if not self._is_last:
            self.abort()
        tasks = [task for task in (self._sending, self._receiving) if task is not None]
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self) -> None:
        is_last = False
        try:
            while not is_last:
                await self._changed.wait()
                self._changed.clear()
                response, self._response = self._response, None
                if response is not None:
                    await self._send(response)
                is_last = self._is_last
                data, self._unsent = bytes(self._unsent), bytearray()
                await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
                if self._exchange.paused_since is not None and not self._unsent:
                    self._exchange.resume()
        except OSError:
            # The client has left, as servers say since version 2.4 of the specification.
            self._exchange.lose()

    async def _receive_forever(self) -> None:
        body = self._exchange.body
        while (message := await self._receive())["type"] == "http.request":
            while body.is_streamed and not body.is_wanted:
                self._wanted.clear()
                await self._wanted.wait()
            if body.is_wanted:
                body.feed(bytearray(message.get("body", b"")))
            if not message.get("more_body", False):
                body.complete()
        body.fail(ClientGoneError())
        self._exchange.lose()


def _client(scope: MutableMapping[str, Any]) -> tuple[str, int] | None:
    client = scope.get("client")
    return None if client is None else (client[0], client[1])


def _head(scope: MutableMapping[str, Any]) -> RequestHead:
    path: str = scope["path"]
    return RequestHead(
        method=scope["method"],
        path=path,
        raw_path=scope.get("raw_path") or path.encode(),
        query=scope.get("query_string", b""),
        headers=[*scope["headers"]],
        http_version=scope["http_version"],
        keep_alive=True,
        content_length=None,
        expects_continue=False,
    )
