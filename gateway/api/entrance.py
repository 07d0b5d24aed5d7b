"""The public port's handler: the endpoints of generation ahead of everything else."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.api.endpoint import Endpoint
from gateway.api.generation_service import GenerationService
from gateway.http1.exchange import Exchange
from gateway.http1.handler_runner import Handler

# Answered even where there are too many connections: a gateway that is busy is not to be taken for a dead one.
ALWAYS_SERVED = frozenset({"/health/live", "/health/ready"})


class Entrance:
    """Chooses who serves a request."""

    def __init__(self, service: GenerationService, endpoints: Iterable[Endpoint], other: Handler) -> None:
        """Pass what is for none of the endpoints on to `other`."""
        self._service = service
        self._endpoints = {endpoint.path: endpoint for endpoint in endpoints}
        self._other = other

    async def __call__(self, exchange: Exchange) -> None:
        """Serve one request."""
        head = exchange.head
        endpoint = self._endpoints.get(head.path) if head.method == "POST" else None
        if endpoint is None:
            await self._other(exchange)
        else:
            await self._service.serve(endpoint, exchange)
