"""The public port over HTTP: spellings of paths, health under other servers' names, and pages of other origins."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker

ORIGIN = "https://chat.example.com"
AUTH = {"Authorization": f"Bearer {API_KEY}"}


@pytest.fixture(scope="module")
def gateway(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), nats_url, cors_origins=f"{ORIGIN}, http://a:1") as gateway:
        yield gateway


async def test_spellings_of_a_path_are_one_route(gateway: GatewayProcess, nats_url: str) -> None:
    async with known_worker(nats_url, gateway) as worker, httpx2.AsyncClient(headers=AUTH) as http:
        for path in ("/v1/models", "/models", "/models/", f"/models/{worker.model}"):
            assert (await http.get(gateway.url + path)).status_code == 200, path
        for path in ("/v1/chat/completions/", "/chat/completions"):
            answer = await http.post(gateway.url + path, json={"model": worker.model, "messages": []})
            assert answer.json()["error"]["param"] == "messages", path
        for path in ("/health", "/ping", "/v1/health"):
            assert (await http.get(gateway.url + path)).status_code == 200, path
        assert (await http.post(gateway.url + "/ping")).status_code == 200
        assert (await http.head(gateway.url + "/health")).status_code == 200
        assert "version" in (await http.get(gateway.url + "/version")).json()


async def test_page_of_a_named_origin_may_ask_and_read(gateway: GatewayProcess) -> None:
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    async with httpx2.AsyncClient() as http:
        preflight = await http.request("OPTIONS", gateway.url + "/v1/chat/completions", headers=asked)
        assert (preflight.status_code, preflight.content) == (204, b"")
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "access-control-allow-credentials" not in preflight.headers
        for path in ("/v1/chat/completions", "/v1/models"):
            answer = await http.post(gateway.url + path, headers={"Origin": ORIGIN})
            assert answer.status_code in (401, 405)
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "retry-after" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["https://chat.example.com.evil", "http://chat.example.com", "null", "*"])
async def test_page_of_another_origin_is_allowed_nothing(gateway: GatewayProcess, origin: str) -> None:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    async with httpx2.AsyncClient() as http:
        for method in ("OPTIONS", "GET"):
            answer = await http.request(method, gateway.url + "/v1/models", headers=headers)
            assert answer.status_code in (401, 405)
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert answer.headers["vary"] == "origin"
