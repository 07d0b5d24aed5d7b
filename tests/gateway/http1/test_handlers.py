"""How each request's handler ends; the exchange notes what it is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.api.door import Door
from gateway.errors import ApiError
from gateway.http1.body import BodyOwner
from gateway.http1.exchange import Exchange
from gateway.http1.handlers import AsgiHandler, Handler, HandlerRunner
from tests.gateway.http1.raw_server import PORT, REQUEST, connected, read_head, read_whole, served
from tests.gateway.wire_worker import until


class Noting:
    """An exchange that notes what happens to it."""

    def __init__(self, path: str = "/x") -> None:
        self.head = SimpleNamespace(path=path)
        self.log: list[tuple[str, object]] = []

    def refuse(self, error: ApiError) -> None:
        self.log.append(("refuse", (error.status, error.code, error.retry_after_s)))

    def abandon(self) -> None:
        self.log.append(("abandon", None))


async def outcome(handler: Handler, exchange: Noting, *, is_limited: bool = False) -> list[tuple[str, object]]:
    runner = HandlerRunner(handler, frozenset({"/health"}))
    runner.run(cast("Any", exchange), is_limited=is_limited)
    await asyncio.gather(*runner._tasks.values())
    assert not runner._tasks
    return exchange.log


async def answer(exchange: Exchange) -> None:
    cast("Any", exchange).log.append(("answer", None))


def failing(error: BaseException) -> Handler:
    async def fail(exchange: Exchange) -> None:
        raise error

    return fail


async def test_handler_runs_once_and_its_exchange_is_let_go() -> None:
    assert await outcome(answer, Noting()) == [("answer", None), ("abandon", None)]


async def test_connection_that_is_one_too_many_is_answered_on_exempt_paths_alone() -> None:
    refusal = ("refuse", (503, "too_many_connections", 1.0))
    assert await outcome(answer, Noting("/x"), is_limited=True) == [refusal]
    assert await outcome(answer, Noting("/health"), is_limited=True) == [("answer", None), ("abandon", None)]


async def test_handler_that_fails_is_logged_and_its_answer_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    assert await outcome(failing(RuntimeError("a bug")), Noting()) == [("abandon", None)]
    assert "a handler failed" in caplog.text


async def test_handler_has_a_task_of_its_own_before_it_waits_for_anything() -> None:
    tasks: list[asyncio.Task[Any] | None] = []

    async def handle(exchange: Exchange) -> None:
        # Asks for the task that it may have to cancel.
        async with asyncio.timeout(10):
            tasks.append(asyncio.current_task())
            await answer(exchange)

    assert await outcome(handle, Noting()) == [("answer", None), ("abandon", None)]
    assert tasks[0] not in (None, asyncio.current_task())


async def test_handlers_that_still_run_are_ended() -> None:
    exchanges = [Noting(), Noting()]

    async def wait(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    runner = HandlerRunner(wait)
    for exchange in exchanges:
        runner.run(cast("Any", exchange), is_limited=False)
    await asyncio.sleep(0)
    await runner.cancel_all()
    assert [exchange.log for exchange in exchanges] == [[("abandon", None)]] * 2
    assert not runner._tasks


async def test_handler_that_has_not_begun_is_let_go() -> None:
    exchange = Noting()
    runner = HandlerRunner(answer)
    runner.run(cast("Any", exchange), is_limited=False)
    await runner.cancel_all()
    assert (exchange.log, runner._tasks) == ([], {})


MAX_BODY_BYTES = 100


async def test_application_sees_the_request_and_its_answer_is_sent_whole() -> None:
    scopes: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        event = await receive()
        await send(
            {"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"9"), (b"x-a", b"b")]}
        )
        await send({"type": "http.response.body", "body": event["body"] + b"!"})

    async with served(AsgiHandler(app, MAX_BODY_BYTES)) as server, connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST.replace(b"/x", b"/x%20y?a=b"))
            status, headers = await read_head(reader)
            assert (status, headers["content-length"], headers["x-a"]) == (201, "3", "b")
            assert await reader.readexactly(3) == b"hi!"
    scope = scopes[0]
    assert (scope["type"], scope["method"], scope["http_version"]) == ("http", "POST", "1.1")
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/x y", b"/x%20y", b"a=b")
    assert (b"host", b"t") in scope["headers"]
    assert scope["client"][0] == "127.0.0.1"
    assert (scope["scheme"], scope["root_path"], scope["server"]) == ("http", "", None)
    assert scope["asgi"]["version"] == "3.0"


async def test_answer_in_pieces_is_sent_as_it_comes_and_waits_for_its_reader() -> None:
    go_on = asyncio.Event()
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await go_on.wait()
        for _ in range(64):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
            sent.append(1)
        await send({"type": "http.response.body", "body": b"last"})

    async with served(AsgiHandler(app, MAX_BODY_BYTES)) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        status, headers = await read_head(reader)
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        assert await reader.readuntil(b"first\r\n") == b"5\r\nfirst\r\n"
        go_on.set()
        await until(lambda: sent)
        await asyncio.sleep(0.2)
        # The kernel holds some; nothing holds all.
        assert len(sent) < 32
        num_bytes, tail = 0, b""
        while not tail.endswith(b"last\r\n0\r\n\r\n"):
            data = await reader.read(1 << 20)
            num_bytes, tail = num_bytes + data.count(b"x"), (tail + data)[-32:]
        assert num_bytes == 64 << 20


async def test_large_body_is_refused_where_the_application_asks_for_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise AssertionError("the body was accepted")

    async with served(AsgiHandler(Door(app, PORT), 1)) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        assert (await read_whole(reader))[0] == 413


async def test_body_belongs_to_the_owner_that_the_application_names() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["body_owner"] = BodyOwner("key", 0)
        await receive()
        raise AssertionError("the body was accepted")

    async with served(AsgiHandler(Door(app, PORT), MAX_BODY_BYTES)) as server, connected(server) as (reader, writer):
        # A body that is not here yet: this key may have none of those.
        writer.write(REQUEST.removesuffix(b"hi"))
        assert (await read_whole(reader))[0] == 429


async def test_application_is_told_when_its_client_leaves() -> None:
    events: list[str] = []
    is_told = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        events.append((await receive())["type"])
        events.append((await receive())["type"])
        is_told.set()

    async with served(AsgiHandler(app, MAX_BODY_BYTES)) as server:
        async with connected(server) as (_, writer):
            writer.write(REQUEST)
            await until(lambda: events)
            await asyncio.sleep(0.02)
            assert not is_told.is_set()
        async with asyncio.timeout(5):
            await is_told.wait()
    assert events == ["http.request", "http.disconnect"]
