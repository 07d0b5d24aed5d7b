"""The generating routes of a gateway process, with a worker that speaks the wire as the test tells it to."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest

from gateway.api.answer import Answer, Outcome
from gateway.api.generation_service import _tokens_used
from gateway.api.generation_starter import Membership
from gateway.errors import ApiError
from shared.messages import Delta, Finish
from tests.gateway.gateway_process import GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import RawClient, connected
from tests.gateway.shared_gateway import OPERATOR_KEY, gateway, nats_url
from tests.gateway.wire_worker import WireWorker, expected_text, token, until

__all__ = ["gateway", "nats_url"]

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def serving(worker: WireWorker) -> AsyncIterator[WireWorker]:
    task = asyncio.create_task(worker.serve(0.001))
    yield worker
    task.cancel()


def _chat(worker: WireWorker, **fields: Any) -> dict[str, Any]:
    return {"model": worker.model, "messages": MESSAGES, "stream": True, "max_tokens": 8} | fields


async def test_chat_stream_follows_the_wire(serving: WireWorker, client: RawClient) -> None:
    client.post("/v1/chat/completions", _chat(serving, stream_options={"include_usage": True}))
    status, headers = await client.head()
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-request-id"].startswith("req_")
    assert int(headers["openai-processing-ms"]) >= 0
    chunks = await client.stream()
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == expected_text(8)
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * 9 + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 11
    assert all(c["usage"] is None for c in chunks[:-1])


async def test_first_write_has_head_role_and_first_token(worker: WireWorker, client: RawClient) -> None:
    client.post("/v1/chat/completions", _chat(worker))
    await worker.begin(1)
    packet = await client.reader.read(65536)
    assert packet.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"role":"assistant"' in packet
    assert b'"content":"0 "' in packet


@pytest.mark.parametrize("stream", [True, False])
async def test_list_of_running_requests_has_the_first_token_of_those_that_have_one(
    worker: WireWorker, client: RawClient, gateway: GatewayProcess, stream: bool
) -> None:
    port = re.search(r"operator's port .*?url=(http://\S+)", gateway.log)
    assert port is not None
    client.post("/v1/chat/completions", _chat(worker, stream=stream))
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {OPERATOR_KEY}"}) as http:

        async def running() -> dict[str, Any]:
            listed = (await http.get(f"{port[1]}/console/api/requests?order=running")).json()["requests"]
            return next((each for each in listed if each["model"] == worker.model), {})

        while not (before := await running()):  # noqa: ASYNC110 - the state of another process
            await asyncio.sleep(0.01)
        assert before.get("first_token_s") is None
        await worker.begin(1)
        while not (after := await running()).get("tokens"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert 0 < after["first_token_s"] < after["ended_s"]


async def test_connection_is_reused_after_a_stream(serving: WireWorker, client: RawClient) -> None:
    for stream in (True, False, True):
        client.post("/v1/chat/completions", _chat(serving, stream=stream))
        if stream:
            await client.head()
            assert len(await client.stream()) == 10
        else:
            status, body = await client.whole()
            assert (status, body["choices"][0]["message"]["content"]) == (200, expected_text(8))


async def test_whole_completion_numbers_prompts_and_choices(serving: WireWorker, client: RawClient) -> None:
    client.post("/v1/completions", {"model": serving.model, "prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    status, body = await client.whole()
    assert status == 200
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in body["choices"]} == {expected_text(3)}
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 12


async def test_choices_get_consecutive_seeds(worker: WireWorker, client: RawClient) -> None:
    client.post("/v1/chat/completions", _chat(worker, n=3, seed=41))
    seeds = [(await worker.next_request()).sampling.seed for _ in range(3)]
    assert sorted(seeds) == [41, 42, 43]


async def test_bad_input_found_by_the_worker_is_a_400(worker: WireWorker, client: RawClient) -> None:
    client.post("/v1/chat/completions", _chat(worker))
    request = await worker.next_request()
    await worker.end(request, 0, Finish("failed", error="The prompt is too long.", error_param="messages"))
    status, body = await client.whole()
    assert status == 400
    assert body["error"]["param"] == "messages"
    assert set(body["error"]) == {"message", "type", "param", "code"}


async def test_prompt_that_fits_no_worker_is_refused_before_the_queue(worker: WireWorker, client: RawClient) -> None:
    worker.max_prompt_characters = 100
    messages = [{"role": "user", "content": "x" * 60}] * 2
    status = 0
    # The next heartbeat says so; until then the request is accepted.
    for _ in range(100):
        client.post("/v1/chat/completions", {"model": worker.model, "messages": messages, "timeout": 0.1})
        status, answer = await client.whole()
        if status == 400:
            break
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "messages"
    assert "at most 100" in answer["error"]["message"]
    while not worker.requests.empty():
        worker.requests.get_nowait()
    client.post("/v1/completions", {"model": worker.model, "prompt": "x" * 100, "max_tokens": 1})
    await worker.end(await worker.next_request(), 0)
    assert (await client.whole())[0] == 200


async def test_failure_in_mid_stream_is_an_error_event_and_done(worker: WireWorker, client: RawClient) -> None:
    client.post("/v1/chat/completions", _chat(worker))
    request = await worker.begin(2)
    await worker.end(request, 2, Finish("failed", error="out of memory"))
    assert (await client.head())[0] == 200
    objects = await client.stream()
    assert objects[-1]["error"]["code"] == "worker_failed"
    assert "out of memory" not in objects[-1]["error"]["message"]
    assert set(objects[-1]["error"]) == {"message", "type", "param", "code"}


async def test_timeout_ends_a_stream_explicitly(worker: WireWorker, client: RawClient) -> None:
    client.post("/v1/chat/completions", _chat(worker, timeout=1.0))
    request = await worker.begin(1)
    assert (await client.head())[0] == 200
    assert (await client.stream())[-1]["error"]["code"] == "timeout"
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels))


async def test_client_that_leaves_is_cancelled_and_counted_once_and_its_line_claims_no_count_of_tokens(
    worker: WireWorker, gateway: GatewayProcess
) -> None:
    async with connected(gateway) as client:
        client.post("/v1/chat/completions", _chat(worker))
        request = await worker.begin(1)
        request_id = (await client.head())[1]["x-request-id"]
        before = await _metric(gateway, "headrace_disconnects_total")
    # Nothing more is written that could fail: only the end of the connection tells it.
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels))
    async with asyncio.timeout(5):
        while (after := await _metric(gateway, "headrace_disconnects_total")) == before:  # noqa: ASYNC110 - until the gateway has heard of it
            await asyncio.sleep(0.02)
    assert after == before + 1
    await until(lambda: f"request_id={request_id}" in gateway.log)
    [line] = [line for line in gateway.log.splitlines() if f"request_id={request_id}" in line]
    assert "outcome=disconnected" in line
    assert "_tokens=" not in line


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_tokens_of_a_stream_whose_client_leaves_count_for_its_tenant(
    worker: WireWorker, gateway: GatewayProcess, path: str
) -> None:
    messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200}
    told = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, messages)
    async with connected(gateway) as client:
        client.post(path, {**told, "model": worker.model, "stream": True})
        request = await worker.next_request()
        await worker.claim(request, prompt_tokens=3)
        await worker.say(request, 0, 7)
        await client.reader.readuntil(b'"6 "')
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels))
    counts = {"requests": 0.0}
    while counts["requests"] < 1:
        counts = {
            name: await _metric(gateway, f"headrace_tenant_{name}_total", f'model="{worker.model}"')
            for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        }
    assert counts == {"requests": 1, "prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 7}


async def _metric(gateway: GatewayProcess, name: str, label: str = "") -> float:
    port = re.search(r"operator's port .*?url=(http://\S+)", gateway.log)
    assert port is not None
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {OPERATOR_KEY}"}) as http:
        text = (await http.get(f"{port[1]}/metrics")).text
    found = re.search(rf"^{name}\{{.*?{re.escape(label)}.*?\}} (\S+)$", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


async def test_client_that_leaves_before_the_claim_cancels(worker: WireWorker, gateway: GatewayProcess) -> None:
    async with connected(gateway) as client:
        client.post("/v1/chat/completions", _chat(worker, stream=False))
        request = await worker.next_request()
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels))


async def test_long_wait_opens_the_stream_with_a_comment(worker: WireWorker, client: RawClient) -> None:
    client.post("/v1/chat/completions", _chat(worker))
    request = await worker.begin()
    async with asyncio.timeout(10):
        assert (await client.head())[0] == 200
        assert (await client.reader.readline()).strip() == b"e"
        assert await client.reader.readline() == b": keep-alive\n"
    await worker.say(request, 0, 1)
    await worker.end(request, 1)


async def test_unknown_model_and_missing_key_are_refused(worker: WireWorker, client: RawClient) -> None:
    client.post("/v1/chat/completions", _chat(worker, model="nobody's"))
    assert (await client.whole())[0] == 404
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n")
    assert (await client.whole())[0] == 401
    client.writer.write(b"GET /v1/completions HTTP/1.1\r\nHost: t\r\n\r\n")
    assert (await client.whole())[0] == 405


async def test_repeated_greedy_request_comes_from_the_cache(serving: WireWorker, client: RawClient) -> None:
    body = _chat(serving, temperature=0, stream=False)
    client.post("/v1/chat/completions", body)
    _, first = await client.whole()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for _ in range(100):
        steps = serving.step
        client.post("/v1/chat/completions", body)
        _, second = await client.whole()
        # The answer is kept a moment after it was given.
        if second["usage"]["prompt_tokens_details"]["cached_tokens"]:
            break
    assert second["choices"] == first["choices"]
    # Its bytes are known now: it is not read any more, and answered all the same with an id of its own.
    client.post("/v1/chat/completions", body)
    _, third = await client.whole()
    assert (third["choices"], third["usage"]) == (second["choices"], second["usage"])
    assert len({answer["id"] for answer in (first, second, third)}) == 3
    assert second["id"] != first["id"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    client.post("/v1/chat/completions", body | {"stream": True})
    await client.head()
    chunks = await client.stream()
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == expected_text(8)
    assert serving.step == steps
    client.post("/v1/chat/completions", body, "Cache-Control: no-cache")
    await client.whole()
    assert serving.step > steps


async def test_five_hundred_streams_at_once_are_all_complete(serving: WireWorker, gateway: GatewayProcess) -> None:
    async def one(index: int) -> str:
        async with connected(gateway) as client:
            client.post(
                "/v1/completions", {"model": serving.model, "prompt": f"{index}", "max_tokens": 20, "stream": True}
            )
            assert (await client.head())[0] == 200
            return "".join(c["choices"][0]["text"] for c in await client.stream())

    texts = await asyncio.gather(*(one(index) for index in range(500)))
    assert set(texts) == {expected_text(20)}


async def test_slow_reader_is_cut_and_its_neighbour_is_not(nats_url: str, tmp_path: Any) -> None:
    with running_gateway(tmp_path, nats_url, stream_buffer_bytes=65536) as gateway:
        async with (
            known_worker(nats_url, gateway) as worker,
            connected(gateway, limit=4096) as slow,
            connected(gateway) as quick,
        ):
            slow.post("/v1/completions", {"model": worker.model, "prompt": "a", "max_tokens": 10000, "stream": True})
            slow_request = await worker.next_request()
            quick.post("/v1/completions", {"model": worker.model, "prompt": "b", "max_tokens": 10000, "stream": True})
            quick_request = await worker.next_request()
            await worker.claim(slow_request)
            await worker.claim(quick_request)
            reply = slow_request.reply
            assert reply is not None
            for position in range(400):
                if worker.cancels:
                    break
                long = Delta(slow_request.id, 0, position, (position,), "x" * 65536)
                await worker.send(reply, [long, token(quick_request, position)])
                await asyncio.sleep(0.001)
            await until(lambda: any(slow_request.id in cancel.ids for cancel in worker.cancels))
            await worker.end(quick_request, position)
            await quick.head()
            assert len(await quick.stream()) > 20
            await slow.head()
            data = await slow.reader.read(-1)
            assert b'"code":"slow_reader"' in data
            assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert "error" in json.loads(data.split(b"data: ")[-2].split(b"\n")[0])


@pytest.mark.parametrize(
    ("outcome", "status", "has_text", "expected"),
    [
        (Outcome.COMPLETED, None, True, 7),
        (Outcome.DISCONNECTED, None, False, 3),
        # Its time was over: what was computed until then counts.
        (Outcome.FAILED, 408, False, 3),
        (Outcome.FAILED, 400, False, 0),
        # Its grammar could not be followed any further.
        (Outcome.FAILED, 400, True, 3),
        (Outcome.FAILED, 500, True, 0),
        (Outcome.FAILED, 503, False, 0),
    ],
)
def test_tokens_that_an_answer_costs_its_key(
    outcome: Outcome, status: int | None, has_text: bool, expected: int
) -> None:
    error = None if status is None else ApiError(status, "x", retry_after_s=1.0)
    answer = SimpleNamespace(num_tokens=7, error=error, first_token_at=1.0 if has_text else None)
    membership = SimpleNamespace(tokens_used=lambda: 3)
    assert _tokens_used(cast("Answer", answer), cast("Membership", membership), outcome) == expected
