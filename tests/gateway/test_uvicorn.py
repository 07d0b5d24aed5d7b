"""The public port's application under uvicorn: plain ASGI, the same answers, and ends that reach the workers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.config import GatewayConfig
from gateway.process import assembly
from shared.messages import Delta, Finish
from shared.task_supervisor import TaskSupervisor
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.known_worker import until_known
from tests.gateway.raw_client import RawClient, connected
from tests.gateway.wire_worker import WireWorker, expected_text, until

uvicorn = pytest.importorskip("uvicorn", reason="a test dependency that this environment does not have yet")

CHAT = "/v1/chat/completions"


@dataclass
class Served:
    """An application that uvicorn serves, and a worker that its gateway knows."""

    worker: WireWorker
    gateway: Any

    def chat(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hi"}]
        return {"model": self.worker.model, "messages": messages, "max_tokens": 4} | fields


@pytest.fixture
async def served(nats_url: str) -> AsyncIterator[Served]:
    config = GatewayConfig(nats_url=nats_url, api_key=API_KEY, max_body_bytes=4096, stream_buffer_bytes=64 << 10)
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(WireWorker(nats_url, "under-uvicorn", "w-under-uvicorn"))
        parts = await assembly.assemble(stack, config, 0, None, TaskSupervisor())
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(parts.application, log_level="warning", lifespan="on", ws="none"))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        await until(lambda: server.started)
        gateway = SimpleNamespace(port=bound.getsockname()[1])
        await until_known(cast("GatewayProcess", gateway), worker.model)
        yield Served(worker, gateway)
        server.should_exit = True
        await serving


@pytest.fixture
async def client(served: Served) -> AsyncIterator[RawClient]:
    async with connected(served.gateway) as client:
        yield client


async def test_chat_is_streamed_and_answered_whole_on_one_connection(served: Served, client: RawClient) -> None:
    serving = asyncio.create_task(served.worker.serve(0.001))
    for _ in range(2):
        client.post(CHAT, served.chat(stream=True), "X-Request-Id: mine")
        status, headers = await client.head()
        assert (status, headers["x-request-id"]) == (200, "mine")
        assert headers["content-type"].startswith("text/event-stream")
        chunks = await client.stream()
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected_text(4)
        client.post("/chat/completions/", served.chat())
        status, body = await client.whole()
        assert (status, body["choices"][0]["message"]["content"]) == (200, expected_text(4))
    serving.cancel()


async def test_errors_are_told_as_ever(served: Served, client: RawClient) -> None:
    client.post(CHAT, served.chat(model="nothing"))
    assert (await client.whole())[1]["error"]["code"] == "model_not_found"
    client.post("/v1/nowhere", {})
    assert (await client.whole())[1]["error"]["code"] == "unknown_url"
    client.post(CHAT, served.chat(user="x" * 5000))
    assert (await client.whole())[0] == 413
    client.post("/tokenize", {"prompt": "x" * 5000})
    assert (await client.whole())[0] == 413
    client.key = "wrong"
    client.post(CHAT, served.chat())
    status, body = await client.whole()
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_failure_in_mid_stream_is_an_error_event_and_done(served: Served, client: RawClient) -> None:
    client.post(CHAT, served.chat(stream=True))
    request = await served.worker.begin(2)
    await served.worker.end(request, 2, Finish("failed", error="out of memory"))
    assert (await client.head())[0] == 200
    assert (await client.stream())[-1]["error"]["code"] == "worker_failed"


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_cancels_at_the_worker(served: Served, stream: bool) -> None:
    async with connected(served.gateway) as client:
        client.post(CHAT, served.chat(stream=stream))
        request = await served.worker.begin(1)
        if stream:
            await client.head()
    await until(lambda: any(request.id in cancel.ids for cancel in served.worker.cancels))


async def test_reader_that_is_too_slow_is_cut(served: Served, client: RawClient) -> None:
    cast("Any", client.writer.transport).pause_reading()
    client.post(CHAT, served.chat(stream=True, max_tokens=4000))
    request = await served.worker.begin(1)
    text = "x" * 20_000
    for position in range(1, 400):
        if served.worker.cancels:
            break
        assert request.reply is not None
        await served.worker.send(request.reply, [Delta(request.id, request.epoch, position, (position,), text)])
        await asyncio.sleep(0.002)
    await until(lambda: any(request.id in cancel.ids for cancel in served.worker.cancels))
