"""The console's answers in JSON, for pages and commands; the operator's port authenticates the caller first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import msgspec
from nats.js import JetStreamContext
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admission.auth import KeyStore
from gateway.api.operator_app import OperatorRoute
from gateway.api.schemas.checks import check_query, invalid_value, whole_number
from gateway.console.keys import ConsoleKeys
from gateway.console.views import NowView, dead_letters_view, nats_away, tenants_view
from gateway.errors import ApiError
from gateway.telemetry.drift_watch import DriftWatch
from gateway.timelines.exchange import TimelineExchange
from gateway.timelines.jobs import JobTimelines
from gateway.timelines.view import view_of
from shared.nats_connection import SEND_ERRORS
from shared.subjects import BATCH_ID
from shared.timeline import MAX_LISTED, Order, Timeline

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Pages load nothing but the console's own files and ask this port alone; no script stands in a page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class ConsoleFiles:
    """Answers with files by their names."""

    def __init__(self) -> None:
        files = [path for path in _FOLDER.iterdir() if path.suffix in _TYPES]
        self._contents = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in files}

    def response(self, request: Request) -> Response:
        """Return the file that the path names, the page itself without a name."""
        name: str = request.path_params.get("name", "index.html")
        found = self._contents.get(name)
        if found is None:
            raise ApiError(404, f"The console has no file {name[:64]!r}.", code="unknown_url")
        content, media_type = found
        tag = f'"{sha256(content).hexdigest()[:16]}"'
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)


API = "/console/api"
PLAYGROUND = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models"})
"""Paths of the public port that the operator's port serves, too, by the public port's rules: with an API key."""
_NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True, slots=True)
class ConsoleServices:
    """Parts that the console reads."""

    now: NowView
    exchange: TimelineExchange
    js: JetStreamContext
    keys: KeyStore
    key_file: ConsoleKeys
    drift: DriftWatch
    device_hour_cost: float | None = None
    shows_prompts: bool = False


class ConsoleRoutes:
    """The handlers."""

    def __init__(self, services: ConsoleServices) -> None:
        self._services = services
        self._files = ConsoleFiles()

    def routes(self) -> list[OperatorRoute]:
        """Return the table."""
        now, js = self._services.now, self._services.js
        return [
            OperatorRoute("/console", self._file, is_open=True),
            OperatorRoute("/console/", self._without_slash, is_open=True),
            OperatorRoute("/console/{name}", self._file, is_open=True),
            _view("now", lambda _: now.view()),
            _view("requests", self._requests, "order", "limit"),
            _view("requests/{id:path}", self._request),
            _view("tenants", lambda _: tenants_view(js, self._services.keys, self._services.device_hour_cost)),
            _view("dead-letters", lambda _: dead_letters_view(js, shows_prompts=self._services.shows_prompts)),
            _view("drift", self._drift),
            OperatorRoute(f"{API}/keys", self._make_key, "POST"),
            OperatorRoute(f"{API}/keys/{{id}}/revoke", self._revoke_key, "POST"),
        ]

    async def _file(self, request: Request) -> Response:
        return self._files.response(request)

    async def _without_slash(self, request: Request) -> Response:
        # Relative, so that it holds behind a proxy that serves this port below a prefix.
        return RedirectResponse("../console", 308)

    async def _requests(self, request: Request) -> dict[str, Any]:
        orders: dict[str, Order] = {order: order for order in get_args(Order)}
        asked = request.query_params.get("order", "recent")
        if asked not in orders:
            raise invalid_value("order", f"'order' must be one of {', '.join(orders)}.")
        limit = whole_number(request.query_params.get("limit"), "limit", 1, MAX_LISTED, 50)
        return {"requests": await self._services.exchange.summaries(orders[asked], limit)}

    async def _request(self, request: Request) -> dict[str, Any]:
        request_id: str = request.path_params["id"]
        found = await self._services.exchange.find(request_id[:256]) or await self._jobs_of(request_id[:256])
        if not found:
            raise ApiError(404, _not_found(request_id[:64]), code="request_not_found")
        return {"requests": [view_of(each, self._services.device_hour_cost) for each in found]}

    async def _jobs_of(self, job_id: str) -> list[Timeline]:
        try:
            return await JobTimelines(self._services.js).find(job_id)
        except SEND_ERRORS as error:
            raise nats_away("batch jobs") from error

    async def _drift(self, request: Request) -> dict[str, Any]:
        try:
            return {"workers": await self._services.drift.view()}
        except SEND_ERRORS as error:
            message = "Counts of answers cannot be read: NATS is away, or `headrace setup` has not been run."
            raise ApiError(503, message, code="queue_unavailable", retry_after_s=5.0) from error

    async def _make_key(self, request: Request) -> Response:
        return _json(await self._services.key_file.make(await request.body()))

    async def _revoke_key(self, request: Request) -> Response:
        return _json(await self._services.key_file.revoke(request.path_params["id"]))


def with_playground(operator: ASGIApp, public: ASGIApp) -> ASGIApp:
    """Return an application of the operator's port that forwards a page's model requests to the public application."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        is_public = scope["type"] == "http" and scope["path"] in PLAYGROUND
        await (public if is_public else operator)(scope, receive, send)

    return application


def _view(path: str, read: Callable[[Request], Awaitable[object]], *names: str) -> OperatorRoute:
    """Return a route that shows the result of `read`; its query may have only these names."""

    async def handler(request: Request) -> Response:
        check_query(request, frozenset(names), allow_unknown=False)
        return _json(await read(request))

    return OperatorRoute(f"{API}/{path}", handler)


def _not_found(request_id: str) -> str:
    if BATCH_ID.fullmatch(request_id):
        return f"{request_id!r} is a batch: ask for one of its lines, {request_id}-1, {request_id}-2 and so on."
    return (
        f"No gateway keeps a request {request_id!r}: it ended more than 15 minutes ago, is older than the last "
        "--keep-requests ones, or came to a gateway that has ended since. If it is a batch job, no worker has begun it."
    )


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), headers=_NO_STORE, media_type="application/json")
