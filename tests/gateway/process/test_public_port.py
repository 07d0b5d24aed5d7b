"""Every route of the public port is described, states who may call it, and follows the settings."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.routing import Route

from gateway.api.door import Application
from gateway.api.generation_service import GenerationRoute
from gateway.config import GatewayConfig
from gateway.openapi.operations import OPERATIONS
from gateway.process.public_port import public_app
from shared.errors import ConfigError

NOTHING = cast("Any", None)


def made(service: Any = None, responses: Any = None, **settings: Any) -> Application:
    services = cast("Any", SimpleNamespace(bodies=None, config=GatewayConfig(**settings), metrics=None, keys=object()))
    return public_app(service, services, responses, NOTHING)


def routes(app: Application) -> list[Route]:
    return [route for route in app.routes if isinstance(route, Route)]


def test_every_route_is_described() -> None:
    paths = {re.sub(r":path\}", "}", route.path) for route in routes(made())}
    assert paths - {"/openapi.json"} == {operation.path for operation in OPERATIONS}


def test_every_route_states_who_may_call_it_and_only_these_are_for_everyone() -> None:
    table = routes(made())
    assert len(table) == len(made().routes)
    assert {route.name.partition(":")[0] for route in table} == {"everyone", "key"}
    open_paths = {route.path for route in table if route.name.startswith("everyone:")}
    assert open_paths == {"/health/live", "/health/ready", "/health", "/ping", "/version", "/openapi.json"}


def test_endpoints_that_generate_stand_first_and_share_one_service() -> None:
    service, store = object(), object()
    table = routes(made(service, store, cors_origins="https://chat.example.com"))
    generating = [route for route in table if isinstance(route, GenerationRoute)]
    assert table[: len(generating)] == generating
    assert table[0].path == "/v1/chat/completions"
    assert {each._service for each in generating} == {service}
    [responses] = [each._served for each in generating if each.path == "/v1/responses"]
    assert responses._store is store  # type: ignore[attr-defined]


def test_door_knows_the_spellings_and_origins_of_the_settings() -> None:
    port = made(cors_origins="https://chat.example.com")._port
    assert port.paths is not None
    assert port.paths.route_path("/models/") == "/v1/models"
    assert port.cross_origin is not None
    assert port.cross_origin._origins == {b"https://chat.example.com"}


def test_without_origins_none_may_read_answers_and_one_that_is_none_is_refused() -> None:
    assert made()._port.cross_origin is None
    with pytest.raises(ConfigError, match="HEADRACE_CORS_ORIGINS"):
        made(cors_origins="chat.example.com")
