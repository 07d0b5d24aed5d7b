"""The door of a port: it receives every request, writes every error and counts every answer.

The door brings the path to its route's spelling, names the request, and passes it on to the routes. Whatever they
answer goes through the request's exchange. Nothing here builds a URL from the Host header.

Pages of another origin may read answers where origins are named (CORS; the Fetch standard). Keys are shown in a header
that a page has to know, never in cookies, so no credentials are allowed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.answer import ResponseHead
from gateway.api.request_observer import RequestObserver
from gateway.errors import ApiError
from gateway.http1.body import ClientGoneError
from gateway.http1.exchange import Exchange, Headers
from gateway.http1.handlers import EXTENSION
from gateway.http1.head import REQUEST_ID, request_id_of
from gateway.metrics import GatewayMetrics
from gateway.streams.dialect import OPENAI, Dialect
from shared.errors import ConfigError

_PREFIX = "/v1"
# Azure's clients put this before what OpenAI's put `/v1` before.
_AZURE = "/openai/"
# The name of a model may have slashes. Clients of Azure's that are given another base URL keep what follows it.
_AZURE_DEPLOYMENT = re.compile(
    r"(?:/openai)?(?:/v1)?/deployments/(?P<model>.{1,512}?)/"
    r"(?P<operation>chat/completions|completions|embeddings|responses)/?"
)
# Cohere's second version is the same for us.
_OTHER_NAMES = {"/v2/rerank": "/v1/rerank"}


def azure_deployment(path: str) -> tuple[str | None, str]:
    """Return the model that a path of Azure's names, and the path without that; any other path as it is."""
    found = _AZURE_DEPLOYMENT.fullmatch(path)
    if found is not None:
        return found["model"], f"{_PREFIX}/{found['operation']}"
    if not path.startswith(_AZURE) or path.startswith(f"{_AZURE}deployments/"):
        return None, path
    rest = path.removeprefix(_AZURE)
    return None, f"/{rest}" if rest.startswith("v1/") else f"{_PREFIX}/{rest}"


class KnownPaths:
    """Finds the route's own spelling of a path. Routes differ in their first part, `/v1` left out."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._known = frozenset(map(_beginning, paths))

    def route_path(self, path: str) -> str:
        """Return the path as its route spells it, or as it is where no route is meant."""
        if len(path) > 1 and path.endswith("/"):
            path = path[:-1]
        path = _OTHER_NAMES.get(path, path)
        if _beginning(path) in self._known:
            return path
        other = path.removeprefix(_PREFIX) if path.startswith(f"{_PREFIX}/") else _PREFIX + path
        return other if _beginning(other) in self._known else path


def _beginning(path: str) -> str:
    parts = path.split("/", 3)
    return "/".join(parts[:3] if parts[1:2] == ["v1"] else parts[:2])


_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+")
_LOCAL_ORIGIN = re.compile(rb"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?")
_MAX_AGE_S = 600
_EXPOSED = (
    b"x-request-id, openai-processing-ms, retry-after, x-headrace-place, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)


class CrossOrigin:
    """The origins whose pages may read answers."""

    def __init__(self, origins: str) -> None:
        """Allow these origins, separated by commas; `localhost` stands for every port of this machine.

        Raises:
            ConfigError: One of them is not an origin.
        """
        named = [origin.strip() for origin in origins.split(",") if origin.strip()]
        self._allows_local = "localhost" in named
        named = [origin for origin in named if origin != "localhost"]
        for origin in named:
            if not _ORIGIN.fullmatch(origin):
                problem = f"{origin!r} is not an origin; write https://chat.example.com, with its port, or localhost"
                raise ConfigError("HEADRACE_CORS_ORIGINS", problem)
        self._origins = frozenset(origin.encode() for origin in named)
        self._is_on = bool(named) or self._allows_local

    def answer_headers(self, exchange: Exchange) -> Headers:
        """Return what every answer to this request carries besides its own headers."""
        if not self._is_on:
            return ()
        origin = _header(exchange, b"origin")
        # A shared cache must not give one origin's answer to another.
        if not self._allows(origin):
            return ((b"vary", b"origin"),)
        return (
            (b"vary", b"origin"),
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
        )

    def answer_preflight(self, exchange: Exchange) -> bool:
        """Answer a browser's question whether a page may make a request; return False for any other request."""
        if exchange.head.method != "OPTIONS" or not self._is_on:
            return False
        method = _header(exchange, b"access-control-request-method")
        if not method or not self._allows(_header(exchange, b"origin")):
            return False
        allowed = (
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
            (b"access-control-allow-headers", _header(exchange, b"access-control-request-headers")),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        )
        exchange.respond(204, allowed, b"")
        return True

    def _allows(self, origin: bytes) -> bool:
        return origin in self._origins or (self._allows_local and _LOCAL_ORIGIN.fullmatch(origin) is not None)


def _header(exchange: Exchange, name: bytes) -> bytes:
    return next((value for key, value in exchange.head.headers if key == name), b"")


# Not a status of HTTP: for metrics and logs alone.
CLIENT_LEFT = 499
_CODES = {404: "unknown_url", 405: "method_not_allowed"}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Port:
    """The door's settings for a port.

    Attributes:
        metrics: Counts answers.
        advice: Returns advice about a path that no route serves.
        dialects: Format of errors at a path; below it too, unless it is OpenAI's. Elsewhere the client's headers
            decide; without them it is OpenAI's. Paths here have their route's spelling.
        paths: The routes' spellings of paths; None takes them as they come.
        cross_origin: Which web pages may read answers; None allows no other origin.
        observer: Reports generations that have ended.
    """

    metrics: GatewayMetrics
    advice: Callable[[str], str]
    dialects: Mapping[str, Dialect] = field(default_factory=dict)
    paths: KnownPaths | None = None
    cross_origin: CrossOrigin | None = None
    observer: RequestObserver | None = None


def application(routes: Sequence[BaseRoute], port: Port) -> Door:
    """Return all routes of a port, behind its door."""
    return Door(Router(routes, redirect_slashes=False).app, port, routes)


class Door:
    """Pure ASGI. Owns nothing of a request; what there is to know of it lies in `scope["state"]["head"]`."""

    def __init__(self, app: ASGIApp, port: Port, routes: Sequence[BaseRoute] = ()) -> None:
        self._app = app
        self.routes = routes
        self._port = port
        self._dialects = port.dialects
        self._others = {each.client_header: each for each in port.dialects.values() if each.client_header is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = exchange_of(scope)
        head = scope["state"]["head"] = self._enter(exchange, scope)
        # Routes that do not serve a request raise then, and do not answer it themselves.
        scope["app"] = self
        try:
            origins = self._port.cross_origin
            if origins is None or not origins.answer_preflight(exchange):
                await self._app(scope, receive, send)
        except ClientGoneError:
            self._port.metrics.disconnects += 1
            self._leave(head, CLIENT_LEFT)
            return
        except ApiError as error:
            self._tell(exchange, head, error)
        except HTTPException as error:
            self._tell(exchange, head, self._not_served(scope, error))
        except Exception:
            _logger.exception("a request failed", extra={"request_id": head.request_id})
            exchange.close_behind()
            message = "The gateway failed to serve this request. The failure was logged."
            self._tell(exchange, head, ApiError(500, message, code="internal_error"))
        status = head.status or exchange.status
        if head.route:
            self._port.metrics.requests[(head.route, status)] += 1
        self._leave(head, status)

    def _enter(self, exchange: Exchange, scope: Scope) -> ResponseHead:
        path, model, headers, port = scope["path"], None, exchange.head.headers, self._port
        dialect = self._dialects.get(path)
        if dialect is None:
            if port.paths is not None:
                model, path = azure_deployment(path)
                path = scope["path"] = port.paths.route_path(path)
            dialect = self._dialects.get(path) or self._dialect(path, headers)
        head = ResponseHead(request_id_of(headers), time.perf_counter(), dialect)
        head.model = model
        request_id = head.request_id.encode()
        exchange.more_headers = [(REQUEST_ID, request_id), *((name, request_id) for name in dialect.id_headers)]
        if port.cross_origin is not None:
            exchange.more_headers += port.cross_origin.answer_headers(exchange)
        return head

    def _dialect(self, path: str, headers: list[tuple[bytes, bytes]]) -> Dialect:
        for start, dialect in self._dialects.items():
            if dialect is not OPENAI and path.startswith(f"{start}/"):
                return dialect
        return next((self._others[name] for name, _ in headers if name in self._others), OPENAI)

    def _tell(self, exchange: Exchange, head: ResponseHead, error: ApiError) -> None:
        head.status = error.status
        if head.record is not None:
            head.record.failed(error)
        if not exchange.started:
            headers = head.headers(error.response_headers())
            exchange.respond(error.status, headers, head.dialect.error_body(error))
        elif head.record is not None:
            # An event stream, which must not end in silence. Another answer is cut by its server.
            exchange.finish_and_close(head.dialect.error_event(error) + head.dialect.end_of_stream)

    def _not_served(self, scope: Scope, error: HTTPException) -> ApiError:
        """Return the 404 of a path, or the 405 of a method: the routes raise nothing else."""
        status, path, headers = error.status_code, scope["path"], dict(error.headers or {})
        if status == 405:
            # The router names those of the first route alone.
            served = [
                each for each in self.routes if isinstance(each, Route) and each.matches(scope)[0] is not Match.NONE
            ]
            allowed = {method for route in served for method in route.methods or ()}
            headers["Allow"] = ", ".join(sorted(allowed)) or headers.get("Allow", "")
        methods = sorted({*headers.get("Allow", "").split(", ")} - {"HEAD"})
        what_to_do = self._port.advice(path) if status == 404 else f"Use {' or '.join(methods)}."
        message = f"{scope['method']} {path[:128]}: {error.detail}. {what_to_do}"
        return ApiError(status, message, code=_CODES.get(status), headers=headers)

    def _leave(self, head: ResponseHead, status: int) -> None:
        if head.record is not None and self._port.observer is not None:
            self._port.observer.end(head.record, status)


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange that the server has put into a scope."""
    exchange: Exchange = scope["extensions"][EXTENSION]
    return exchange


def head_of(scope: Scope) -> ResponseHead:
    """Return the head that the door has put into a scope."""
    head: ResponseHead = scope["state"]["head"]
    return head
