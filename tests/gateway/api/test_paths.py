"""A path is found in all spellings that clients use."""

from __future__ import annotations

import time

import pytest

from gateway.api.door import KnownPaths, UnservedPaths, azure_deployment

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


SERVED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/models",
    "/v1/files",
    "/v1/batches",
    "/tokenize",
    "/openapi.json",
)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        # Base URLs that end too early or too late.
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/models", "/v1/models"),
        ("/v1/messages/v1/messages", "/v1/messages"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/openai/deployments/x/chat/completions", "/v1/chat/completions"),
        ("/api/v1/models", "/v1/models"),
        ("/V1/Chat/Completions", "/v1/chat/completions"),
        ("/v1/chat/completions ", "/v1/chat/completions"),
    ],
)
def test_path_that_ends_like_a_served_one_is_told_of_the_base_url(path: str, meant: str) -> None:
    advice = UnservedPaths(SERVED).advice(path)
    assert advice.startswith(f"Did you mean {meant}? ")
    assert "base URL" in advice


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/response", "/v1/responses"),
        ("/v1/message", "/v1/messages"),
        ("/v1/messages/count_token", "/v1/messages/count_tokens"),
    ],
)
def test_misspelt_path_is_told_the_nearest(path: str, meant: str) -> None:
    assert UnservedPaths(SERVED).advice(path) == f"Did you mean {meant}?"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/threads/t/messages", "previous_response_id"),
        ("/", "/v1/models"),
        ("/v1/conversations", "previous_response_id"),
        ("/v1/audio/transcriptions", "text only"),
        ("/v1/images/generations", "text only"),
        ("/generate", "/v1/completions"),
        ("/v2/embed", "/v1/embeddings"),
        ("/metrics", "operator's port"),
        ("/v1/chat/completions/chatcmpl-1/messages", "not kept"),
        ("/api/chat", "Ollama's own API is not served: choose an OpenAI-compatible server"),
        ("/api/v0/chat", "base URL ending in /v1."),
        ("/v1/chat", "/v1/chat/completions"),
        ("/healthz", "/health/ready"),
        ("/v1/uploads", "in one piece, at /v1/files"),
        ("/v1/messages/batches", "upload a file at /v1/files, and name it at /v1/batches"),
        ("/v1/messages/batches/msgbatch_1/results", "name it at /v1/batches"),
        ("/console", "the console is at the operator's, which `headrace up` prints"),
        ("/console/api/requests/my-request", "This is the public port"),
        ("/nothing", "/openapi.json"),
        ("/v1/model" * 1000, "/openapi.json"),
    ],
)
def test_other_path_is_told_what_stands_for_it(path: str, named: str) -> None:
    advice = UnservedPaths(SERVED).advice(path)
    assert named in advice
    assert "Did you mean" not in advice


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
        paths.advice(azure_deployment(path)[1])
        return time.process_time() - started

    paths = UnservedPaths(SERVED)
    assert min(cost_s() for _ in range(5)) < 0.005


@pytest.mark.parametrize("before", ["/a" * 3900, "/v1" + "/a" * 3900])
def test_base_url_of_thousands_of_parts_is_told_too(before: str) -> None:
    assert UnservedPaths(SERVED).advice(f"{before}/chat/completions").startswith("Did you mean /v1/chat/completions? ")
