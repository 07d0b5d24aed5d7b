"""Every route of the public port is described, and nothing else is; every API follows the settings."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.api.endpoint import Endpoint
from gateway.api.generation_service import GenerationService
from gateway.config import GatewayConfig
from gateway.http1.asgi import AsgiHandler
from gateway.openapi.operations import OPERATIONS
from gateway.process.public_port import public_app, public_handler
from gateway.responses.store import ResponseStore
from shared.errors import ConfigError


def made(**settings: Any) -> tuple[tuple[str, ...], list[Endpoint]]:
    services = cast("Any", SimpleNamespace(bodies=None, config=GatewayConfig(**settings)))
    app, endpoints = public_app(services, cast("Any", None))
    return app.paths, endpoints


def test_every_route_is_described() -> None:
    paths = {re.sub(r":path\}", "}", path) for path in made()[0]}
    assert paths - {"/openapi.json"} == {operation.path for operation in OPERATIONS}


def test_handler_serves_the_endpoints_the_other_routes_and_the_origins_of_the_settings() -> None:
    services = cast("Any", SimpleNamespace(bodies=None, config=GatewayConfig(cors_origins="https://chat.example.com")))
    service, store = cast("GenerationService", object()), cast("ResponseStore", object())
    entrance = public_handler(service, services, store)
    assert entrance._service is service
    assert entrance._endpoints.keys() == {endpoint.path for endpoint in made()[1]}
    assert isinstance(entrance._other, AsgiHandler)
    assert entrance._paths.route_path("/models/") == "/v1/models"
    assert entrance._cross_origin._origins == {b"https://chat.example.com"}
    assert entrance._endpoints["/v1/responses"]._store is store  # type: ignore[attr-defined]


def test_without_origins_none_may_read_answers_and_one_that_is_none_is_refused() -> None:
    config = GatewayConfig()
    nothing = cast("Any", None)
    entrance = public_handler(nothing, cast("Any", SimpleNamespace(bodies=None, config=config)), nothing)
    assert entrance._cross_origin._origins == frozenset()
    wrong = cast("Any", SimpleNamespace(bodies=None, config=GatewayConfig(cors_origins="chat.example.com")))
    with pytest.raises(ConfigError, match="HEADRACE_CORS_ORIGINS"):
        public_handler(nothing, wrong, nothing)
