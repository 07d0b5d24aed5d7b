"""The public port's handler: paths and origins, then the endpoints of generation ahead of everything else."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.api.cross_origin import CrossOrigin
from gateway.api.endpoint import Endpoint
from gateway.api.generation_service import GenerationService
from gateway.api.paths import KnownPaths, azure_deployment
from gateway.http1.exchange import Exchange
from gateway.http1.handler_runner import Handler

# Answered even where there are too many connections: a gateway that is busy is not to be taken for a dead one.
ALWAYS_SERVED = frozenset({"/health", "/health/live", "/health/ready", "/ping"})


class Entrance:
    """Chooses who serves a request."""

    def __init__(
        self,
        service: GenerationService,
        endpoints: Iterable[Endpoint],
        other: Handler,
        paths: KnownPaths,
        cross_origin: CrossOrigin,
    ) -> None:
        """Pass what is for none of the endpoints on to `other`; `paths` are those of all routes."""
        self._paths = paths
        self._cross_origin = cross_origin
        self._service = service
        self._endpoints = {endpoint.path: endpoint for endpoint in endpoints}
        self._other = other

    async def __call__(self, exchange: Exchange) -> None:
        """Serve one request."""
        path = exchange.path
        if path not in self._endpoints:
            exchange.model, path = azure_deployment(path)
            path = exchange.path = self._paths.route_path(path)
        exchange.more_headers = self._cross_origin.answer_headers(exchange)
        if self._cross_origin.answer_preflight(exchange):
            return
        endpoint = self._endpoints.get(path) if exchange.head.method == "POST" else None
        if endpoint is None:
            await self._other(exchange)
        else:
            await self._service.serve(endpoint, exchange)
