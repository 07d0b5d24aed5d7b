"""Exchanges over `receive` and `send`: what another server is sent, when, and what becomes of clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.http1.body import WITHOUT_KEY, BodyBudget, ClientGoneError
from gateway.streams import plain_asgi
from gateway.streams.plain_asgi import MAX_UNSENT_BYTES, AsgiExchange
from tests.gateway.wire_worker import until


class Server:
    """What an ASGI server hands an application; `is_open` lets `send` return."""

    def __init__(self, *bodies: bytes, method: str = "POST") -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": "/x",
            "headers": [(b"host", b"t")],
            "http_version": "1.1",
            "client": ["127.0.0.1", 5],
        }
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for index, body in enumerate(bodies):
            message = {"type": "http.request", "body": body, "more_body": index < len(bodies) - 1}
            self.received.put_nowait(message)
        self.sent: list[dict[str, Any]] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.error: Exception | None = None

    def leave(self) -> None:
        self.received.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Any) -> None:
        await self.is_open.wait()
        if self.error is not None:
            raise self.error
        self.sent.append(message)

    def exchange(self) -> AsgiExchange:
        return AsgiExchange(self.scope, self.received.get, self.send, BodyBudget(1000, 4))

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False


async def test_whole_answer_has_its_length_and_the_doors_headers() -> None:
    server = Server(b"a", b"bc")
    async with server.exchange() as exchange:
        assert exchange.client == ("127.0.0.1", 5)
        assert await exchange.read_body(3) == b"abc"
        exchange.more_headers = [(b"x-request-id", b"r")]
        exchange.respond(201, [(b"x-a", b"b")], b"hello")
        exchange.respond(500, [], b"never")
    start = {"type": "http.response.start", "status": 201}
    headers = [(b"x-request-id", b"r"), (b"x-a", b"b"), (b"content-length", b"5")]
    assert server.sent[0] == start | {"headers": headers}
    assert (server.body, server.is_complete, exchange.status) == (b"hello", True, 201)


async def test_answer_to_head_has_no_body() -> None:
    server = Server(method="HEAD")
    async with server.exchange() as exchange:
        exchange.respond(200, [], b"hello")
    assert (server.sent[0]["headers"], server.body) == ([(b"content-length", b"5")], b"")


async def test_pieces_are_sent_as_they_come_and_held_back_while_the_client_does_not_read() -> None:
    server, resumed = Server(), asyncio.Event()
    async with server.exchange() as exchange:
        exchange.on_writable = resumed.set
        exchange.start(200, [])
        exchange.write(b"first")
        await until(lambda: server.body == b"first")
        server.is_open.clear()
        for _ in range(3):
            exchange.write(b"x" * MAX_UNSENT_BYTES)
            await asyncio.sleep(0)
        assert exchange.paused_since is not None
        server.is_open.set()
        await resumed.wait()
        assert exchange.paused_since is None
        exchange.finish(b"last")
        exchange.write(b"late")
    assert server.body == b"first" + 3 * MAX_UNSENT_BYTES * b"x" + b"last"
    assert server.is_complete


@pytest.mark.parametrize("has_read", [False, True])
async def test_client_that_leaves_is_told_to_the_answer(has_read: bool) -> None:
    server, gone = (Server(b"a") if has_read else Server()), asyncio.Event()
    async with server.exchange() as exchange:
        if has_read:
            await exchange.read_body(1)
            exchange.on_disconnect = gone.set
            server.leave()
            await gone.wait()
        else:
            server.leave()
            with pytest.raises(ClientGoneError):
                await exchange.read_body(1)
        assert exchange.disconnected
        exchange.respond(200, [], b"nobody reads this")
    assert server.sent == []


async def test_server_that_cannot_send_any_more_ends_the_answer() -> None:
    server, gone = Server(), asyncio.Event()
    server.error = OSError("gone")
    async with server.exchange() as exchange:
        exchange.on_disconnect = gone.set
        exchange.start(200, [])
        exchange.write(b"x")
        await gone.wait()
    assert exchange.closed


async def test_body_that_is_too_large_is_refused_before_its_rest_comes() -> None:
    server = Server(b"abc", b"def", b"")
    async with server.exchange() as exchange:
        with pytest.raises(ApiError) as caught:
            await exchange.read_body(4)
        assert caught.value.status == 413
        exchange.respond(413, [], b"")
    assert server.is_complete


async def test_answer_that_is_not_complete_is_left_to_be_cut() -> None:
    server = Server()
    async with server.exchange() as exchange:
        exchange.start(200, [])
        exchange.write(b"x")
        await until(lambda: server.body == b"x")
    assert not server.is_complete


async def test_end_of_a_cut_stream_waits_for_its_reader_for_a_moment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_asgi, "CLOSE_TIMEOUT_S", 0.05)
    server = Server()
    server.is_open.clear()
    async with asyncio.timeout(5), server.exchange() as exchange:
        exchange.start(200, [])
        exchange.finish_and_close(b"cut")
    assert not server.is_complete
    # Nothing goes on for a client that does not read.
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_body_is_streamed_no_faster_than_it_is_read() -> None:
    server = Server(b"ab", b"cd", b"ef")
    async with server.exchange() as exchange:
        pieces = exchange.stream_body(100, WITHOUT_KEY)
        assert await anext(pieces) == b"ab"
        await asyncio.sleep(0.01)
        # One message waits in the hands of the exchange, the others with the server.
        assert server.received.qsize() == 1
        assert [piece async for piece in pieces] == [b"cd", b"ef"]
        exchange.respond(200, [], b"")
