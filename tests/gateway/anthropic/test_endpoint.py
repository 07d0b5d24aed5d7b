"""`/v1/messages` of a gateway process, with a worker that speaks the wire as the test tells it to."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

from shared.messages import Finish, Usage
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.known_worker import known_worker
from tests.gateway.shared_gateway import gateway, nats_url
from tests.gateway.wire_worker import expected_text

__all__ = ["gateway", "nats_url"]


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]} | fields


async def test_message_is_answered_whole_and_streamed(gateway: GatewayProcess, nats_url: str) -> None:
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
    async with known_worker(nats_url, gateway) as worker, httpx2.AsyncClient(headers=headers) as http:
        serving = asyncio.create_task(worker.serve())
        answer = await http.post(f"{gateway.url}/v1/messages", json=body(worker.model))
        assert answer.status_code == 200
        assert answer.json()["content"] == [{"type": "text", "text": expected_text(8)}]
        assert answer.json()["stop_reason"] == "max_tokens"
        assert answer.json()["usage"]["input_tokens"] == 3
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        answer = await http.post(f"{gateway.url}/v1/messages", json=body(worker.model, stream=True))
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
        expected = ["message_start", "content_block_start", *["content_block_delta"] * 8, "content_block_stop"]
        assert names == [*expected, "message_delta", "message_stop"]
        serving.cancel()


async def test_stop_sequence_is_named(gateway: GatewayProcess, nats_url: str) -> None:
    async with known_worker(nats_url, gateway) as worker, httpx2.AsyncClient(headers={"x-api-key": API_KEY}) as http:
        url = f"{gateway.url}/v1/messages"
        asking = asyncio.create_task(http.post(url, json=body(worker.model, stop_sequences=["END"])))
        request = await worker.begin(2)
        assert request.sampling.stop == ("END",)
        await worker.end(request, 2, Finish("stop", Usage(3, 2), stop="END"))
        message = (await asking).json()
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


async def test_errors_of_every_path_have_the_form_of_the_client_that_asks(gateway: GatewayProcess) -> None:
    own, key = {"anthropic-version": "2023-06-01"}, {"x-api-key": API_KEY}
    async with httpx2.AsyncClient(base_url=gateway.url) as http:
        for path, headers, status, kind in (
            ("/v1/files", key, 404, "not_found_error"),
            ("/v1/models/nope", key, 404, "not_found_error"),
            ("/v1/models", {}, 401, "authentication_error"),
        ):
            error = (await http.get(path, headers=headers)).json()
            assert set(error) == {"error"}
            assert set(error["error"]) == {"message", "type", "param", "code"}
            answer = await http.get(path, headers=headers | own)
            error = answer.json()
            assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
            assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_errors_have_anthropics_form(gateway: GatewayProcess, nats_url: str) -> None:
    # While no worker at all is heard no model is unknown.
    async with known_worker(nats_url, gateway), httpx2.AsyncClient() as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            url = gateway.url + path
            answer = await http.post(url, json=body("m"))
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            answer = await http.post(url, json=body("nobody"), headers={"x-api-key": API_KEY})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
            answer = await http.post(url, json=body("m", messages=5), headers={"x-api-key": API_KEY})
            error = answer.json()
            assert (answer.status_code, error["type"], error["error"]["type"]) == (
                400,
                "error",
                "invalid_request_error",
            )
            assert "messages" in error["error"]["message"]
