"""The door of a port: each answer is counted once, each error is told once, and no event stream ends in silence."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.admission.auth import Principal
from gateway.api.app import GenerationRoute
from gateway.api.door import Application, Door, Port, exchange_of, head_of
from gateway.api.endpoint import ChatEndpoint
from gateway.api.generation_service import GenerationService
from gateway.api.large_bodies import LargeBodies
from gateway.api.request_observer import RequestRecord
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.http1.body import ClientGoneError
from gateway.http1.handlers import EXTENSION, AsgiHandler
from gateway.metrics import GatewayMetrics
from gateway.streams.dialect import OPENAI
from tests.gateway.http1.raw_server import connected, read_chunked, read_head, served

REQUEST = b"GET /%b HTTP/1.1\r\nHost: t\r\nX-Request-Id: mine\r\n\r\n"


class Behind:
    """One route, `/x`, that does as the test says, and what the door tells of it."""

    def __init__(self, error: Exception | None = None, *, begins: bool = False, generates: bool = False) -> None:
        self.error = error
        self.begins = begins
        self.generates = generates
        self.metrics = GatewayMetrics()
        self.ended: list[tuple[str | None, int]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head, exchange = head_of(scope), exchange_of(scope)
        head.route = "x"
        head.limits = {"x-ratelimit-limit-requests": "5"}
        if self.generates:
            head.record = RequestRecord("x", head.request_id)
        if self.begins:
            exchange.start(200, [])
            exchange.write(b"begun")
        if self.error is not None:
            raise self.error
        exchange.finish() if self.begins else exchange.respond(200, [], b"ok")

    @property
    def handler(self) -> AsgiHandler:
        def end(record: RequestRecord, status: int) -> None:
            self.ended.append((record.error_code, status))

        observer = cast("Any", SimpleNamespace(end=end))
        port = Port(self.metrics, lambda path: "Do this.", observer=observer)
        return AsgiHandler(Application([Route("/x", self, methods=["GET"])], port), 100)


async def ask(behind: Behind, path: bytes = b"x") -> tuple[int, dict[str, str], bytes]:
    async with served(behind.handler) as server, connected(server) as (reader, writer):
        writer.write(REQUEST % path)
        status, headers = await read_head(reader)
        if "content-length" in headers:
            return status, headers, await reader.readexactly(int(headers["content-length"]))
        return status, headers, await read_chunked(reader)


async def test_answer_is_named_and_counted_by_its_route() -> None:
    behind = Behind()
    status, headers, body = await ask(behind)
    assert (status, headers["x-request-id"], body) == (200, "mine", b"ok")
    assert behind.metrics.requests == {("x", 200): 1}
    assert behind.ended == []


async def test_path_that_is_no_route_is_told_what_to_do_and_counted_nowhere() -> None:
    behind = Behind()
    status, headers, body = await ask(behind, b"nothing")
    assert (status, headers["x-request-id"]) == (404, "mine")
    assert b"Do this." in body
    assert not behind.metrics.requests


async def test_error_is_told_with_the_limits_known_so_far_and_ends_the_record() -> None:
    behind = Behind(ApiError(429, "no", code="busy", retry_after_s=2.0), generates=True)
    status, headers, body = await ask(behind)
    assert (status, headers["retry-after"], headers["x-ratelimit-limit-requests"]) == (429, "2", "5")
    assert body == cast("ApiError", behind.error).body()
    assert behind.metrics.requests == {("x", 429): 1}
    assert behind.ended == [("busy", 429)]


async def test_failure_is_logged_with_the_requests_id_and_closes_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    behind = Behind(RuntimeError("secret"))
    status, headers, body = await ask(behind)
    assert (status, headers["connection"]) == (500, "close")
    assert b"secret" not in body
    [line] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert cast("Any", line).request_id == "mine"
    assert behind.metrics.requests == {("x", 500): 1}


@pytest.mark.parametrize("error", [ApiError(503, "late", code="late"), RuntimeError("secret")])
async def test_stream_that_has_begun_says_that_it_failed(error: Exception) -> None:
    behind = Behind(error, begins=True, generates=True)
    status, _, body = await ask(behind)
    assert status == 200
    assert body.startswith(b'begundata: {"error":')
    assert body.endswith(OPENAI.end_of_stream)
    code, status = behind.ended[0]
    assert status == (503 if code == "late" else 500)


async def test_answer_that_is_no_stream_of_events_is_cut_where_it_failed() -> None:
    handler = Behind(RuntimeError("broken"), begins=True).handler
    async with served(handler) as server, connected(server) as (reader, writer):
        writer.write(REQUEST % b"x")
        await read_head(reader)
        assert await reader.read() == b"5\r\nbegun\r\n"


async def test_client_that_left_is_counted_as_that_and_not_as_an_answer() -> None:
    behind = Behind(ClientGoneError(), generates=True)
    async with served(behind.handler) as server, connected(server) as (reader, writer):
        writer.write(REQUEST % b"x")
        assert await reader.read() == b""
    assert (behind.metrics.disconnects, behind.ended, +behind.metrics.requests) == (1, [(None, 499)], {})


async def test_client_that_leaves_while_its_body_is_read_is_counted_and_told_to_no_one() -> None:
    told: list[tuple[object, int]] = []

    async def leave(*arguments: object) -> bytes:
        raise ClientGoneError

    nothing, metrics = cast("Any", None), GatewayMetrics()
    keys = cast("Any", SimpleNamespace(authenticate=lambda headers, notes: Principal("key", "tenant")))
    observer = SimpleNamespace(
        begin=lambda route, request_id, headers: route, end=lambda record, status: told.append((record, status))
    )
    services = SimpleNamespace(config=GatewayConfig(), keys=keys, metrics=metrics, bodies=nothing)
    parts: list[Any] = [services, nothing, nothing, nothing, observer, nothing]
    service = GenerationService(*parts)
    exchange = SimpleNamespace(head=SimpleNamespace(headers=[], notes={}), read_body=leave)
    route = GenerationRoute(ChatEndpoint(LargeBodies()), service)
    door = Door(route.handle, Port(metrics, lambda path: "", observer=cast("Any", observer)))
    scope = {"type": "http", "method": "POST", "path": "/x", "extensions": {EXTENSION: exchange}, "state": {}}
    await door(scope, nothing, nothing)
    assert told == [("chat", 499)]
    assert metrics.disconnects == 1
    assert not metrics.requests
