"""A client that leaves while its request is read is counted once, and answered by nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gateway.admission.auth import Principal
from gateway.api.door import Door, Port
from gateway.api.endpoint import ChatEndpoint
from gateway.api.generation_service import GenerationRoute, GenerationService
from gateway.api.large_bodies import LargeBodies
from gateway.config import GatewayConfig
from gateway.http1.body import BodyBudget, ClientGoneError
from gateway.http1.handlers import EXTENSION
from gateway.metrics import GatewayMetrics


async def test_client_that_leaves_while_its_body_is_read_is_counted_and_told_to_nobody() -> None:
    told: list[tuple[object, int]] = []

    async def leave(*arguments: object) -> bytes:
        raise ClientGoneError

    nothing, metrics = cast("Any", None), GatewayMetrics()
    keys = cast("Any", SimpleNamespace(authenticate=lambda headers, notes: Principal("key", "tenant")))
    observer = SimpleNamespace(
        begin=lambda route, request_id, headers: route, end=lambda record, status: told.append((record, status))
    )
    services = SimpleNamespace(config=GatewayConfig(), keys=keys, metrics=metrics, bodies=nothing)
    parts: list[Any] = [services, nothing, nothing, nothing, nothing, observer]
    service = GenerationService(*parts)
    exchange = SimpleNamespace(head=SimpleNamespace(headers=[], notes={}), read_body=leave)
    route, budget = GenerationRoute(ChatEndpoint(LargeBodies()), service), BodyBudget(1, 1)
    door = Door(route.handle, Port(metrics, lambda path: "", 1, budget, observer=cast("Any", observer)))
    scope = {"type": "http", "method": "POST", "path": "/x", "extensions": {EXTENSION: exchange}, "state": {}}
    await door(scope, nothing, nothing)
    assert told == [("chat", 499)]
    assert metrics.disconnects == 1
    assert not metrics.requests
