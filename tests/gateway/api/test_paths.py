"""A path is found in all spellings that clients use."""

from __future__ import annotations

import pytest

from gateway.api.paths import KnownPaths

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
