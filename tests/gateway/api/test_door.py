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
from gateway.api.door import CrossOrigin, Door, Port, application, exchange_of, head_of
from gateway.api.endpoint import ChatEndpoint
from gateway.api.generation_service import GenerationService
from gateway.api.large_bodies import LargeBodies
from gateway.api.request_observer import RequestRecord
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.http1.body import ClientGoneError
from gateway.http1.handlers import EXTENSION, AsgiHandler
from gateway.http1.head import parse_head
from gateway.metrics import GatewayMetrics
from gateway.streams.dialect import OPENAI
from shared.errors import ConfigError
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
        return AsgiHandler(application([Route("/x", self, methods=["GET"])], port), 100)


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
    assert b"GET /nothing: Not Found. Do this." in body
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


CHAT, OTHER = b"https://chat.example.com", b"https://other.example.com"
ORIGINS = " https://chat.example.com, http://localhost:3000,,"


class Asked:
    """An exchange of which only the head is known; `answer` is what it is answered with."""

    def __init__(self, method: str, **headers: bytes) -> None:
        lines = b"".join(b"%b: %b\r\n" % (name.replace("_", "-").encode(), text) for name, text in headers.items())
        self.head = parse_head(b"%b /v1/models HTTP/1.1\r\nHost: t\r\n%b\r\n" % (method.encode(), lines))
        self.answer: tuple[int, dict[bytes, bytes], bytes] | None = None

    def respond(self, status: int, headers: Any, body: bytes) -> None:
        self.answer = (status, dict(headers), body)


def headers(asked: Asked, origins: str = ORIGINS) -> dict[bytes, bytes]:
    return dict(CrossOrigin(origins).answer_headers(asked))  # type: ignore[arg-type]


def is_preflight(asked: Asked, origins: str = ORIGINS) -> bool:
    return CrossOrigin(origins).answer_preflight(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("origin", [CHAT, b"http://localhost:3000"])
def test_page_of_a_named_origin_may_read_answers_and_their_headers(origin: bytes) -> None:
    found = headers(Asked("GET", origin=origin))
    exposed = found.pop(b"access-control-expose-headers").split(b", ")
    assert found == {b"vary": b"origin", b"access-control-allow-origin": origin}
    assert {b"x-request-id", b"retry-after", b"x-ratelimit-remaining-tokens"} <= set(exposed)


@pytest.mark.parametrize("given", [{"origin": OTHER}, {"origin": b"null"}, {}, {"origin": CHAT + b"/"}])
def test_other_pages_may_not_and_caches_are_told(given: dict[str, bytes]) -> None:
    assert headers(Asked("GET", **given)) == {b"vary": b"origin"}


@pytest.mark.parametrize("origins", ["", " , "])
def test_without_origins_nothing_is_said(origins: str) -> None:
    assert headers(Asked("GET", origin=CHAT), origins) == {}
    assert not is_preflight(Asked("OPTIONS", origin=CHAT, access_control_request_method=b"POST"), origins)


def test_question_before_a_request_is_answered() -> None:
    asked = Asked(
        "OPTIONS",
        origin=CHAT,
        access_control_request_method=b"POST",
        access_control_request_headers=b"authorization, content-type",
    )
    assert is_preflight(asked)
    assert asked.answer == (
        204,
        {
            b"access-control-allow-methods": b"GET, HEAD, POST, DELETE",
            b"access-control-allow-headers": b"authorization, content-type",
            b"access-control-max-age": b"600",
        },
        b"",
    )


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("GET", {"origin": CHAT, "access_control_request_method": b"POST"}),
        ("OPTIONS", {"origin": CHAT}),
        ("OPTIONS", {"origin": OTHER, "access_control_request_method": b"POST"}),
        ("OPTIONS", {"access_control_request_method": b"POST"}),
    ],
)
def test_what_is_no_such_question_is_left_to_the_routes(method: str, given: dict[str, bytes]) -> None:
    asked = Asked(method, **given)
    assert not is_preflight(asked)
    assert asked.answer is None


@pytest.mark.parametrize("origin", ["chat.example.com", "*", "https://a.com/", "ftp://a.com", "https://A.com", "null"])
def test_what_is_no_origin_is_refused_by_its_variable(origin: str) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_CORS_ORIGINS") as refused:
        CrossOrigin(f"https://chat.example.com,{origin}")
    assert repr(origin) in str(refused.value)


@pytest.mark.parametrize(
    "origin", [b"http://localhost", b"http://localhost:5173", b"https://127.0.0.1:1", b"http://[::1]:80"]
)
def test_localhost_stands_for_every_port_of_this_machine(origin: bytes) -> None:
    assert headers(Asked("GET", origin=origin), "localhost")[b"access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "origin", [b"http://localhost.example.com", b"http://localhost:5173x", b"http://notlocalhost", b"null", CHAT, b""]
)
def test_localhost_stands_for_no_other_machine(origin: bytes) -> None:
    assert b"access-control-allow-origin" not in headers(Asked("GET", origin=origin), "localhost")
