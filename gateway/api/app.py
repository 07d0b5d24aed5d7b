"""The Starlette application around the routes of the public port, behind the endpoints of generation.

What is not a route is a 404, and what is the wrong method a 405, in the same form as every other error there.
Nothing here builds a URL from the Host header, so slashes are not redirected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.api.endpoint import Endpoint
from gateway.api.routes import KeyRoute, Routes, RouteServices, dialect_of, error_response
from gateway.api.unserved_paths import UnservedPaths
from gateway.errors import ApiError
from gateway.http1.body import ClientGoneError
from gateway.http1.request_id import RequestIdMiddleware
from gateway.streams.dialect import OPENAI, Dialect

_CODES = {404: "unknown_url", 405: "method_not_allowed"}


@dataclass(frozen=True, slots=True)
class PublicApp:
    """The application, and the paths of all its routes."""

    application: ASGIApp
    paths: tuple[str, ...]


def create_app(
    services: RouteServices,
    endpoints: Iterable[Endpoint],
    more: Iterable[KeyRoute] = (),
    open_routes: Iterable[Route] = (),
) -> PublicApp:
    """Return the application for everything on the public port but POST on these endpoints.

    Args:
        services: What the routes work with.
        endpoints: Answered ahead of the application.
        more: Routes of other APIs.
        open_routes: Routes for everyone.
    """
    endpoints = tuple(endpoints)
    posts = [Route(endpoint.path, _only_post, methods=["POST"]) for endpoint in endpoints]
    dialects = {endpoint.path: endpoint.dialect for endpoint in endpoints if endpoint.dialect is not OPENAI}
    routes = Routes(services, dialects.values())
    every = [*routes.public(), *map(routes.with_key, more), *open_routes, *posts]
    paths = tuple(route.path for route in every)
    return PublicApp(build_app(every, UnservedPaths(paths).advice, dialects), paths)


def build_app(
    routes: list[Route], advice: Callable[[str], str], dialects: Mapping[str, Dialect] = MappingProxyType({})
) -> ASGIApp:
    """Return an application of these routes.

    Args:
        routes: What is served.
        advice: Says what to do instead of asking for a path that is none of theirs.
        dialects: How errors are told at and below a path. Elsewhere they are told as the client's headers say, and in
            OpenAI's four keys where they say nothing.
    """

    def dialect(request: Request) -> Dialect:
        path = request.scope["path"]
        found = [each for start, each in dialects.items() if f"{path}/".startswith(f"{start}/")]
        return found[0] if found else dialect_of(request, dialects.values())

    async def http_error(request: Request, error: Exception) -> Response:
        return _http_error(request, error, dialect(request), advice)

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error, dialect(request))

    async def internal_error(request: Request, error: Exception) -> Response:
        message = "The server failed to handle the request."
        return error_response(ApiError(500, message, code="internal_error"), dialect(request))

    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: http_error,
            ApiError: api_error,
            ClientGoneError: _client_gone,
            Exception: internal_error,
        },
    )
    app.router.redirect_slashes = False
    return RequestIdMiddleware(app)


async def _only_post(request: Request) -> Response:
    # POST is answered ahead of this application; the route exists so that other methods are told what is allowed.
    raise HTTPException(404)


def _http_error(request: Request, error: Exception, dialect: Dialect, advice: Callable[[str], str]) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    path = request.scope["path"]
    headers = dict(error.headers or {})
    # Starlette raises nothing but a 404 and, with the methods of the path, a 405.
    methods = sorted({*headers.get("Allow", "").split(", ")} - {"HEAD"})
    what_to_do = advice(path) if status == 404 else f"Use {' or '.join(methods)}."
    message = f"{request.method} {path[:128]}: {error.detail}. {what_to_do}"
    return error_response(ApiError(status, message, code=_CODES.get(status), headers=headers), dialect)


async def _client_gone(request: Request, error: Exception) -> Response:
    # Nobody reads this.
    return Response(status_code=499)
