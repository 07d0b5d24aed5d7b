"""The application of the public port: one table with every route, the endpoints that generate first."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Route

from gateway.api.cross_origin import CrossOrigin
from gateway.api.door import Application, Port
from gateway.api.endpoint import Endpoint
from gateway.api.generation_service import GenerationRoute, GenerationService
from gateway.api.paths import KnownPaths, UnservedPaths
from gateway.api.request_observer import RequestObserver
from gateway.api.routes import KeyRoute, Routes, RouteServices
from gateway.http1.body import BodyBudget
from gateway.streams.dialect import Dialect

# Answered even where there are too many connections: a gateway that is busy is not to be taken for a dead one.
ALWAYS_SERVED = frozenset({"/health", "/health/live", "/health/ready", "/ping"})


def create_app(
    services: RouteServices,
    service: GenerationService,
    endpoints: Iterable[Endpoint],
    more: Iterable[KeyRoute] = (),
    open_routes: Iterable[Route] = (),
    observer: RequestObserver | None = None,
) -> Application:
    """Return the application of everything on the public port.

    Args:
        services: What the routes work with.
        service: Serves the endpoints.
        endpoints: Those that generate; each asks for a key.
        more: Routes of other APIs, for those who have a key.
        open_routes: Routes for everyone.
        observer: Tells of generations.

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
        advice=UnservedPaths(paths).advice,
        max_body_bytes=config.max_body_bytes,
        budget=BodyBudget(config.max_body_bytes_in_flight, config.max_connections),
        dialects=dialects | {route.path: route.dialect for route in more if route.dialect is not None},
        paths=KnownPaths(paths),
        cross_origin=CrossOrigin(config.cors_origins) if config.cors_origins else None,
        observer=observer,
    )
    return Application([*routes, *cold], port)
