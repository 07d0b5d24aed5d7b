"""Incident class: reads that no limit counts. A key that may ask twice a minute does not read without end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.api_keys import create_key
from gateway.responses.items import new_response_id
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.raw_client import RawClient, connected

READS_PER_MINUTE = 6
STORED = f"/v1/responses/{new_response_id()}"


@pytest.fixture(scope="module")
def limited(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GatewayProcess, str]]:
    directory: Path = tmp_path_factory.mktemp("gateway")
    _, key = create_key(directory / "keys.json", tenant="t", requests_per_minute=2, reads_per_minute=READS_PER_MINUTE)
    with running_gateway(directory, nats_url, keys_file=directory / "keys.json") as gateway:
        yield gateway, key


async def _ask(client: RawClient, method: str, path: str) -> tuple[int, Any]:
    head = f"{method} {path} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {client.key}\r\nContent-Length: 0\r\n\r\n"
    client.writer.write(head.encode())
    return await client.whole()


async def test_every_way_to_read_what_is_stored_counts(limited: tuple[GatewayProcess, str]) -> None:
    gateway, key = limited
    ways = [("GET", STORED), ("GET", f"{STORED}?stream=true"), ("GET", f"{STORED}/input_items")]
    ways += [("POST", f"{STORED}/cancel"), ("DELETE", STORED), ("GET", STORED)]
    async with connected(gateway, key=key) as client:
        for method, path in ways:
            assert (await _ask(client, method, path))[0] == 404
        for method, path in ways:
            status, answer = await _ask(client, method, path)
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
            assert f"{READS_PER_MINUTE} reads of stored data per minute" in answer["error"]["message"]
        # A conversation is read before the limits of the request are asked.
        body = {"model": "m", "input": "x", "previous_response_id": STORED.rpartition("/")[2]}
        client.post("/v1/responses", body)
        status, answer = await client.whole()
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "reads of stored data" in answer["error"]["message"]
    async with connected(gateway, key=API_KEY) as neighbour:
        assert (await _ask(neighbour, "GET", STORED))[0] == 404
