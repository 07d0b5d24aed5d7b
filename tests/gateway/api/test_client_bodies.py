"""Bodies as tools send them that people use, over HTTP: nothing that has one meaning, or none here, is refused."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncAzureOpenAI

from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.known_worker import known_worker
from tests.gateway.shared_gateway import gateway, nats_url
from tests.gateway.wire_worker import WireWorker, expected_text
from tests.images import encoded, picture

__all__ = ["gateway", "nats_url"]

PNG = f"data:image/png;base64,{base64.b64encode(encoded(picture(4, 4))).decode()}"
USER = {"role": "user", "content": "hi"}
# A turn that the user stopped before its first token, as clients keep it.
STOPPED = [
    {"role": "assistant", "content": None},
    {"role": "assistant"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "assistant", "content": "", "tool_calls": []},
]

# Others than those that are kept with their sources.
BODIES: dict[str, dict[str, Any]] = {
    "clients of Ollama": {"num_ctx": 8192, "keep_alive": "5m", "think": False},
    "LangChain": {"stop": [""], "stream_options": {}, "n": 1, "presence_penalty": 0},
    "stream options of nothing": {"stream": False, "stream_options": {"include_usage": False}},
    "user as an object": {"user": {"id": "7", "name": "Ann"}},
    "OpenRouter's": {"reasoning": {"effort": "none", "exclude": True}, "provider": {"order": ["x"]}},
    "proxies'": {"conversationId": "c", "thread_id": "t", "trace_id": "d", "generation_name": "g"},
}
SENT: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "clients/bodies.json").read_text())["bodies"]


@pytest.fixture
async def worker(gateway: GatewayProcess, nats_url: str) -> AsyncIterator[WireWorker]:
    """The one worker of the gateway, which serves."""
    async with known_worker(nats_url, gateway, chat_format="hermes") as worker:
        task = asyncio.create_task(worker.serve(0.001))
        yield worker
        task.cancel()


async def post(gateway: GatewayProcess, path: str, body: dict[str, Any], **options: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=20) as http:
        headers = {"authorization": f"Bearer {API_KEY}", **options.pop("headers", {})}
        content = options.pop("content", None) or json.dumps(body).encode()
        return await http.post(path, content=content, headers={**headers, "content-type": "application/json"})


def text(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


async def until_only_one(gateway: GatewayProcess) -> None:
    """Wait until the workers of the tests before are forgotten."""
    async with asyncio.timeout(20), httpx2.AsyncClient(base_url=gateway.url) as http:
        while len((await http.get("/v1/models", headers={"x-api-key": API_KEY})).json()["data"]) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("sent", SENT, ids=[f"{sent['client']}: {sent['sends']}" for sent in SENT])
async def test_body_that_a_tool_sends_is_answered(
    worker: WireWorker, gateway: GatewayProcess, sent: dict[str, Any]
) -> None:
    body = {**sent["body"], **({"model": worker.model} if "model" in sent["body"] else {})}
    answer = await post(gateway, sent["path"].format(model=worker.model), body)
    assert answer.status_code == 200, answer.text
    num_tokens = next(
        body[name] for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in body
    )
    assert whole_text(answer) == expected_text(num_tokens)


def whole_text(answer: httpx2.Response) -> str:
    """The text of an answer of any API, streamed or not."""
    if answer.headers["content-type"] == "application/json":
        answers = [answer.json()]
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        answers = [json.loads(line) for line in lines if line != "[DONE]"]
    return "".join(map(text_of, answers))


def text_of(part: dict[str, Any]) -> str:
    """The text that an answer, or an event of one, brings."""
    if part.get("object") == "response":
        return "".join(text["text"] for item in part["output"] for text in item["content"])
    if part.get("type") == "response.output_text.delta":
        return str(part["delta"])
    choices = part.get("choices") or [{}]
    message = choices[0].get("message") or choices[0].get("delta") or {"content": choices[0].get("text")}
    return message.get("content") or ""


@pytest.mark.parametrize("tool", BODIES)
async def test_body_of_a_tool_is_served(worker: WireWorker, gateway: GatewayProcess, tool: str) -> None:
    body = {"model": worker.model, "messages": [USER], "max_tokens": 4, **BODIES[tool]}
    assert text(await post(gateway, "/v1/chat/completions", body)) == expected_text(4)


@pytest.mark.parametrize("stopped", STOPPED)
async def test_turn_that_was_stopped_does_not_poison_its_conversation(
    worker: WireWorker, gateway: GatewayProcess, stopped: dict[str, Any]
) -> None:
    body = {"model": worker.model, "messages": [USER, stopped, USER], "max_tokens": 4}
    assert text(await post(gateway, "/v1/chat/completions", body)) == expected_text(4)


@pytest.mark.parametrize("model", [{}, {"model": None}])
async def test_model_that_is_left_out_is_the_only_one(
    worker: WireWorker, gateway: GatewayProcess, model: dict[str, Any]
) -> None:
    await until_only_one(gateway)
    answer = await post(gateway, "/v1/chat/completions", {**model, "messages": [USER], "max_tokens": 4})
    assert (text(answer), answer.json()["model"]) == (expected_text(4), worker.model)
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 4}),
        ("/v1/responses", {"input": "x", "store": False, "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 4}),
    ):
        answer = await post(gateway, path, {**model, **body})
        assert (answer.status_code, answer.json().get("model")) == (200, worker.model), answer.text


async def test_model_that_is_left_out_is_asked_for_where_several_are_served(
    worker: WireWorker, gateway: GatewayProcess, nats_url: str
) -> None:
    async with known_worker(nats_url, gateway):
        answer = await post(gateway, "/v1/chat/completions", {"messages": [USER]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "model", "missing_required_parameter")


async def test_deployment_of_azures_path_is_the_model(worker: WireWorker, gateway: GatewayProcess) -> None:
    path = f"/openai/deployments/{worker.model}/chat/completions?api-version=2024-10-21"
    for named in ({}, {"model": "gpt-4o"}):
        body = {**named, "messages": [USER], "max_tokens": 4}
        async with httpx2.AsyncClient(base_url=gateway.url, timeout=20) as http:
            answer = await http.post(path, json=body, headers={"api-key": API_KEY})
        assert (text(answer), answer.json()["model"]) == (expected_text(4), worker.model)
    unknown = path.replace(worker.model, "nobody")
    answer = await post(gateway, unknown, {"model": worker.model, "messages": [USER]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_azures_own_client_is_served(worker: WireWorker, gateway: GatewayProcess) -> None:
    options = {"azure_endpoint": gateway.url, "api_key": API_KEY, "api_version": "2025-04-01-preview"}
    async with AsyncAzureOpenAI(**options) as azure:  # type: ignore[call-overload]
        chat = await azure.chat.completions.create(model=worker.model, messages=[USER], max_tokens=4)
        assert chat.choices[0].message.content == expected_text(4)
        # It names no deployment in the paths of these.
        response = await azure.responses.create(model=worker.model, input="hi", max_output_tokens=4, store=False)
        assert response.output_text == expected_text(4)
        assert worker.model in [model.id async for model in azure.models.list()]


async def test_same_body_at_two_deployments_is_answered_by_each(
    worker: WireWorker, gateway: GatewayProcess, nats_url: str
) -> None:
    """Greedy answers of the same bytes are repeated from a cache, which must not mix the models up."""
    body = {"messages": [USER], "max_tokens": 4, "temperature": 0}
    async with known_worker(nats_url, gateway) as other:
        task = asyncio.create_task(other.serve(0.001))
        models = [worker.model, other.model, worker.model, other.model]
        told = [
            (await post(gateway, f"/openai/deployments/{model}/chat/completions", body)).json()["model"]
            for model in models
        ]
        task.cancel()
    assert told == models


async def test_compressed_body_is_read(worker: WireWorker, gateway: GatewayProcess) -> None:
    body = gzip.compress(json.dumps({"model": worker.model, "messages": [USER], "max_tokens": 4}).encode())
    packed = {"content-encoding": "gzip"}
    assert text(await post(gateway, "/v1/chat/completions", {}, content=body, headers=packed)) == expected_text(4)
    bomb = gzip.compress(b" " * (64 << 20))
    answer = await post(gateway, "/v1/chat/completions", {}, content=bomb, headers=packed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
