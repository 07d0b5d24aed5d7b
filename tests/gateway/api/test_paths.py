"""A path is found in all spellings that clients use."""

from __future__ import annotations

import time

import pytest

from gateway.api.door import KnownPaths, azure_deployment

PATHS = KnownPaths(
    ["/v1/models", "/v1/models/{model:path}", "/v1/chat/completions", "/tokenize", "/health/live", "/v1/rerank"]
)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/models", "/v1/models"),
        ("/models", "/v1/models"),
        ("/models/org/name/", "/v1/models/org/name"),
        ("/v1/models/v1/x", "/v1/models/v1/x"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/tokenize/", "/tokenize"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health/live", "/health/live"),
        ("/v1/v1/models", "/v1/models"),
        ("/v2/rerank", "/v1/rerank"),
        ("/rerank/", "/v1/rerank"),
    ],
)
def test_spelling_of_a_path_leads_to_its_route(path: str, route: str) -> None:
    assert PATHS.route_path(path) == route


@pytest.mark.parametrize("path", ["/", "/nowhere", "/v1/nowhere", "/v1", "/v1x/models", "*", "//"])
def test_path_of_no_route_leads_nowhere(path: str) -> None:
    assert PATHS.route_path(path) in (path, path[:-1])


@pytest.mark.parametrize(
    ("path", "model", "route"),
    [
        ("/openai/deployments/m/chat/completions", "m", "/v1/chat/completions"),
        ("/openai/deployments/org/m/completions/", "org/m", "/v1/completions"),
        ("/openai/deployments/m/embeddings", "m", "/v1/embeddings"),
        ("/openai/v1/chat/completions", None, "/v1/chat/completions"),
        ("/openai/responses", None, "/v1/responses"),
        ("/openai/models/m", None, "/v1/models/m"),
        ("/openai/v1/deployments/m/responses", "m", "/v1/responses"),
        ("/deployments/m/chat/completions", "m", "/v1/chat/completions"),
        ("/v1/deployments/m/chat/completions", "m", "/v1/chat/completions"),
        ("/openai/deployments/m/images", None, "/openai/deployments/m/images"),
        ("/openai/deployments//embeddings", None, "/openai/deployments//embeddings"),
        ("/v1/models", None, "/v1/models"),
    ],
)
def test_path_of_azures_clients_names_a_model(path: str, model: str | None, route: str) -> None:
    assert azure_deployment(path) == (model, route)


@pytest.mark.parametrize(
    "path",
    [
        "/a" * 3900,
        "/v1" + "/a" * 3900,
        "/openai/deployments/" + "a/" * 3900,
        "/messages" * 850,
        "/v1/models" * 780,
        "/" * 7800,
        "/v1/threads/" + "1" * 7800 + "/messages",
    ],
)
def test_path_as_long_as_a_head_may_be_costs_no_more_than_its_length(path: str) -> None:
    def cost_s() -> float:
        started = time.process_time()
        PATHS.route_path(azure_deployment(path)[1])
        return time.process_time() - started

    assert min(cost_s() for _ in range(5)) < 0.005
