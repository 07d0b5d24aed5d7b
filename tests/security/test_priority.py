"""Incident class: a key that goes before everybody. A priority is bounded by the key, on every endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.api_keys import create_key
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import connected

ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/responses", {"input": "x", "background": True}),
    ("/v1/responses/compact", {"input": "x"}),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ("/v1/score", {"text_1": "x", "text_2": "y"}),
]


@pytest.fixture(scope="module")
def keyed(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GatewayProcess, str, str]]:
    directory: Path = tmp_path_factory.mktemp("gateway")
    keys = directory / "keys.json"
    _, ordinary = create_key(keys, tenant="t")
    _, urgent = create_key(keys, tenant="t", max_priority=5)
    settings = {"keys_file": keys, "responses_secret": "s" * 32}
    with running_gateway(directory, nats_url, **settings) as gateway:
        yield gateway, ordinary, urgent


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=[f"{path} {len(body)}" for path, body in ENDPOINTS])
async def test_priority_above_that_of_the_key_is_refused(
    keyed: tuple[GatewayProcess, str, str], path: str, body: dict[str, Any]
) -> None:
    gateway, ordinary, urgent = keyed
    for key, priority, limit in ((ordinary, 1, 0), (urgent, 100, 5)):
        async with connected(gateway, key=key) as client:
            client.post(path, {"model": "m", **body, "priority": priority})
            status, answer = await client.whole()
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "priority", "invalid_value")
            told = f"'priority' is {priority}, and this key allows at most {limit}."
            if "background" in body:
                told = "'priority' of a background response must be at most 0, as that of any job."
            assert answer["error"]["message"] == told


async def test_priority_within_that_of_the_key_goes_on(keyed: tuple[GatewayProcess, str, str], nats_url: str) -> None:
    gateway, ordinary, urgent = keyed
    async with known_worker(nats_url, gateway) as worker:
        for key, priority in ((ordinary, 0), (ordinary, -3), (urgent, 5), (API_KEY, 100)):
            async with connected(gateway, key=key) as client:
                client.post(
                    "/v1/completions", {"model": worker.model, "prompt": "a", "max_tokens": 1, "priority": priority}
                )
                request = await worker.next_request()
                assert request.priority == priority
                await worker.end(request, 0)
                assert (await client.whole())[0] == 200
