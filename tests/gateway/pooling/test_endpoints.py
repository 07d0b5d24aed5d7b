"""Embeddings, reranking and scores of a gateway process, with a worker that speaks the wire as the test tells it to."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from shared.bounds import MAX_SEQUENCES
from shared.messages import Finish, Request, Usage
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.known_worker import known_worker
from tests.gateway.shared_gateway import gateway, nats_url
from tests.gateway.wire_worker import WireWorker

__all__ = ["gateway", "nats_url"]

FRESH = {"Cache-Control": "no-cache"}


@pytest.fixture
async def http(gateway: GatewayProcess) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with httpx2.AsyncClient(headers=headers, base_url=gateway.url, timeout=20) as http:
        yield http


def packed(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


async def served(worker: WireWorker, http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> httpx2.Response:
    serving = asyncio.create_task(worker.serve())
    try:
        return await http.post(path, json={"model": worker.model, **body})
    finally:
        serving.cancel()


async def test_embeddings_come_in_the_order_of_the_inputs(worker: WireWorker, http: httpx2.AsyncClient) -> None:
    answer = await served(worker, http, "/v1/embeddings", {"input": ["four", "sixsix"]})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [4.0, 1.0]},
            {"object": "embedding", "index": 1, "embedding": [6.0, 1.0]},
        ],
        "model": worker.model,
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }
    assert answer.headers["x-request-id"]


async def test_many_inputs_take_no_more_of_the_queue_than_an_ordinary_answer(
    worker: WireWorker, http: httpx2.AsyncClient
) -> None:
    texts = ["x" * (1 + number % 50) for number in range(2 * MAX_SEQUENCES + 5)]
    asking = asyncio.create_task(http.post("/v1/embeddings", json={"model": worker.model, "input": texts}))
    unanswered: list[Request] = []
    for _ in texts:
        while not unanswered or not worker.requests.empty():
            unanswered.append(await worker.next_request())
            await worker.claim(unanswered[-1])
        assert len(unanswered) <= MAX_SEQUENCES
        await worker.pool(unanswered.pop(0))
    assert worker.requests.empty()
    vectors = [entry["embedding"][0] for entry in (await asking).json()["data"]]
    assert vectors == [len(text) for text in texts]


async def test_base64_has_the_bytes_of_the_wire(worker: WireWorker, http: httpx2.AsyncClient) -> None:
    answer = await served(worker, http, "/v1/embeddings", {"input": "four", "encoding_format": "base64"})
    assert base64.b64decode(answer.json()["data"][0]["embedding"]) == packed(4.0, 1.0)


async def test_request_on_the_wire_says_what_is_asked(worker: WireWorker, http: httpx2.AsyncClient) -> None:
    body = {"model": worker.model, "input": [[5, 6]], "dimensions": 1, "normalize": False, "priority": 3}
    asking = asyncio.create_task(http.post("/embeddings", json=body))
    request = await worker.next_request()
    assert request.pooling is not None
    assert (request.pooling.task, request.pooling.dimensions, request.pooling.normalize) == ("embed", 1, False)
    assert (request.token_ids, request.priority, request.sampling.max_tokens) == ((5, 6), 3, 0)
    await worker.pool(request)
    assert (await asking).status_code == 200


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_documents_are_ranked_and_repeated(worker: WireWorker, http: httpx2.AsyncClient, path: str) -> None:
    body = {"query": "q", "documents": ["aaa", {"text": "a"}, "aaaaa", "aaa"], "top_n": 3}
    answer = (await served(worker, http, path, body)).json()
    assert answer["results"] == [
        {"index": 2, "relevance_score": 5.0, "document": {"text": "aaaaa"}},
        {"index": 0, "relevance_score": 3.0, "document": {"text": "aaa"}},
        {"index": 3, "relevance_score": 3.0, "document": {"text": "aaa"}},
    ]
    assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    assert answer["id"].startswith("rerank-")
    short = await served(worker, http, path, body | {"return_documents": False})
    assert all("document" not in result for result in short.json()["results"])


async def test_teis_form_gets_teis_answer(worker: WireWorker, http: httpx2.AsyncClient) -> None:
    body = {"query": "q", "texts": ["aaa", "aaaaa"], "return_text": True}
    answer = (await served(worker, http, "/rerank", body)).json()
    assert answer == [{"index": 1, "score": 5.0, "text": "aaaaa"}, {"index": 0, "score": 3.0, "text": "aaa"}]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_come_in_the_order_of_the_texts(worker: WireWorker, http: httpx2.AsyncClient, path: str) -> None:
    answer = (await served(worker, http, path, {"text_1": "q", "text_2": ["aaa", "a"]})).json()
    assert answer["data"] == [
        {"index": 0, "object": "score", "score": 3.0},
        {"index": 1, "object": "score", "score": 1.0},
    ]
    assert (answer["object"], answer["model"]) == ("list", worker.model)


async def test_refusal_of_the_worker_names_the_field_of_the_body(worker: WireWorker, http: httpx2.AsyncClient) -> None:
    for path, body, param, name in (
        ("/v1/embeddings", {"input": "x"}, "prompt", "input"),
        ("/v1/embeddings", {"input": ["x", "y"]}, "prompt", "input.[0]"),
        ("/v1/embeddings", {"input": "x", "dimensions": 9}, "dimensions", "dimensions"),
        ("/v1/rerank", {"query": "q", "documents": ["x", "y"]}, "prompt", "documents.[0]"),
        ("/v1/score", {"text_1": "q", "text_2": "x"}, "query", "text_1"),
    ):
        asking = asyncio.create_task(http.post(path, json={"model": worker.model, **body}, headers=FRESH))
        requests = [await worker.next_request() for _ in range(1 + ("[" in name))]
        first = min(requests, key=lambda request: request.id)
        await worker.claim(first)
        await worker.end(first, 0, Finish("failed", error="No.", error_param=param, error_code="too_long"))
        answer = await asking
        error = {"message": "No.", "type": "invalid_request_error", "param": name, "code": "too_long"}
        assert (answer.status_code, answer.json()["error"]) == (400, error)


async def test_worker_that_sends_no_numbers_is_a_server_error(worker: WireWorker, http: httpx2.AsyncClient) -> None:
    asking = asyncio.create_task(http.post("/v1/embeddings", json={"model": worker.model, "input": "x"}))
    request = await worker.begin()
    await worker.end(request, 0, Finish("length", Usage(3, 0)))
    assert (await asking).status_code == 500


async def test_model_that_cannot_is_refused_before_the_queue(worker: WireWorker, http: httpx2.AsyncClient) -> None:
    worker.tasks = ("embed",)
    bodies = {
        "/v1/score": {"text_1": "q", "text_2": "x"},
        "/v1/completions": {"prompt": "x"},
    }
    answers: dict[str, httpx2.Response] = {}

    async def ask() -> bool:
        for path, body in bodies.items():
            answers[path] = await http.post(path, json={"model": worker.model, "timeout": 0.2, **body})
        return all(answer.status_code == 400 for answer in answers.values())

    async with asyncio.timeout(10):
        while not await ask():  # noqa: ASYNC110 - until the gateway has heard the worker's next heartbeat
            await asyncio.sleep(0.05)
    error = answers["/v1/score"].json()["error"]
    assert (error["param"], error["code"]) == ("model", "unsupported_task")
    assert "cannot score texts for a query: it can make embeddings." in error["message"]
    assert "cannot generate text" in answers["/v1/completions"].json()["error"]["message"]


async def test_killed_worker_s_inputs_are_computed_by_another(
    gateway: GatewayProcess, nats_url: str, http: httpx2.AsyncClient
) -> None:
    async with known_worker(nats_url, gateway) as first:
        body = {"model": first.model, "input": ["four", "sixsix"]}
        asking = asyncio.create_task(http.post("/v1/embeddings", json=body))
        done = await first.begin()
        lost = await first.begin()
        await first.pool(done)
        async with WireWorker(nats_url, first.model, "second") as second:
            await first.die()
            again = await second.begin()
            assert (again.id, again.pooling, again.emitted) == (lost.id, lost.pooling, ())
            assert again.epoch > lost.epoch
            await second.pool(again)
            answer = (await asking).json()
            assert [entry["embedding"] for entry in answer["data"]] == [[4.0, 1.0], [6.0, 1.0]]
