"""The application of the public port: one table with every route, the endpoints that generate first."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from gateway.api.door import CrossOrigin, Door, KnownPaths, Port, application, exchange_of, head_of
from gateway.api.endpoint import Endpoint
from gateway.api.generation_service import GenerationService
from gateway.api.request_observer import RequestObserver
from gateway.api.routes import KeyRoute, Routes, RouteServices
from gateway.streams.dialect import Dialect

# Answered even where there are too many connections: a gateway that is busy is not to be taken for a dead one.
ALWAYS_SERVED = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
_NOT_SERVED = (
    "Check the client's base URL: for OpenAI's libraries it ends in /v1, for Anthropic's with the port. "
    "GET /openapi.json describes the API; metrics and the console are at the operator's port."
)


class GenerationRoute(Route):
    """The route of an endpoint that generates: it answers through the exchange in the scope, and never by `send`.

    Its path has no parameters, so that it is found by a comparison, and nothing of Starlette's stays under a stream.
    """

    def __init__(self, endpoint: Endpoint, service: GenerationService) -> None:
        super().__init__(endpoint.path, self.handle, methods=["POST"], name=f"key:{endpoint.path}")
        self._served = endpoint
        self._service = service

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether a request is for this route."""
        if scope["type"] != "http" or scope["path"] != self.path:
            return Match.NONE, {}
        return (Match.FULL if scope["method"] == "POST" else Match.PARTIAL), {}

    def handle(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Serve one request."""
        if scope["method"] != "POST":
            return super().handle(scope, receive, send)
        return self._service.serve(self._served, exchange_of(scope), head_of(scope))


def create_app(
    services: RouteServices,
    service: GenerationService,
    endpoints: Iterable[Endpoint],
    more: Iterable[KeyRoute] = (),
    open_routes: Iterable[Route] = (),
    observer: RequestObserver | None = None,
) -> Door:
    """Return the application of everything on the public port; `open_routes` alone ask for no key.

    Raises:
        ConfigError: An origin of the settings is none.
    """
    endpoints, more, config = tuple(endpoints), tuple(more), services.config
    routes: list[BaseRoute] = [GenerationRoute(each, service) for each in endpoints]
    table = Routes(services)
    cold = [*table.public(), *map(table.with_key, more), *open_routes]
    paths = [*(endpoint.path for endpoint in endpoints), *(route.path for route in cold)]
    dialects: dict[str, Dialect] = {endpoint.path: endpoint.dialect for endpoint in endpoints}
    port = Port(
        metrics=services.metrics,
        advice=lambda _path: _NOT_SERVED,
        dialects=dialects | {route.path: route.dialect for route in more if route.dialect is not None},
        paths=KnownPaths(paths),
        cross_origin=CrossOrigin(config.cors_origins) if config.cors_origins else None,
        observer=observer,
    )
    return application([*routes, *cold], port)
