"""Answers of numbers on a transport that keeps what it is given."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest

from gateway.admission.auth import Principal
from gateway.api.answer import Asked, ResponseHead
from gateway.errors import ApiError
from gateway.pooling.answers import EmbeddingsAnswer, RerankAnswer, ScoreAnswer
from gateway.pooling.parsing import parse_embeddings, parse_rerank, parse_score
from shared.bounds import MAX_SEQUENCES
from shared.messages import Delta, Finish, Request, Usage
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.kept_exchange import kept_exchange
from tests.gateway.known_worker import known_worker
from tests.gateway.shared_gateway import gateway, nats_url
from tests.gateway.wire_worker import WireWorker


async def test_first_output_of_embeddings_is_their_first_vector() -> None:
    exchange, _, transport = kept_exchange()
    request = parse_embeddings(b'{"model": "m", "input": ["a", "b"]}')
    started = time.perf_counter()
    answer = EmbeddingsAnswer(Asked(exchange, request, ResponseHead("req_1", started), Principal("k", "t")))
    answer.sinks[1].deliver(Delta("r", 0, 0, prompt_tokens=1))
    assert answer.first_token_at is None
    answer.sinks[1].deliver(Delta("r", 0, 0, finish=Finish("length", Usage(1, 0), vector=struct.pack("<f", 2.0))))
    first = answer.first_token_at
    assert first is not None
    assert started <= first <= time.perf_counter()
    assert not transport.writes
    answer.sinks[0].deliver(Delta("r", 0, 0, finish=Finish("length", Usage(1, 0), vector=struct.pack("<f", 1.0))))
    assert answer.first_token_at == first
    body = transport.body()
    assert [entry["embedding"] for entry in body["data"]] == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("kind", "parse", "body", "place"),
    [
        (EmbeddingsAnswer, parse_embeddings, {"input": ["a", "b"]}, "input.[1]"),
        (RerankAnswer, parse_rerank, {"query": "q", "documents": ["a", "b"]}, "documents.[1]"),
        (RerankAnswer, parse_rerank, {"query": "q", "texts": ["a", "b"]}, "texts.[1]"),
        (ScoreAnswer, parse_score, {"text_1": "q", "text_2": ["a", "b"]}, "text_2.[1]"),
    ],
)
async def test_error_of_one_text_says_which_it_is_and_is_the_same_otherwise(
    kind: Any, parse: Any, body: dict[str, Any], place: str
) -> None:
    exchange, _, transport = kept_exchange()
    request = parse(msgspec.json.encode({"model": "m", **body}))
    answer = kind(Asked(exchange, request, ResponseHead("req_1", 0.0), Principal("k", "t")))
    headers = {"x-told": "yes"}
    answer.sinks[1].fail(
        ApiError(429, "Too much.", param="prompt", code="busy", type="own", retry_after_s=7.0, headers=headers)
    )
    error = {"message": "Too much.", "type": "own", "param": place, "code": "busy"}
    assert transport.body()["error"] == error
    sent = bytes(transport.sent).lower()
    assert b"retry-after: 7" in sent
    assert b"x-told: yes" in sent


async def test_of_documents_that_are_equally_relevant_the_earlier_is_first() -> None:
    exchange, _, transport = kept_exchange()
    request = parse_rerank(b'{"model": "m", "query": "q", "documents": ["a", "b", "c"]}')
    answer = RerankAnswer(Asked(exchange, request, ResponseHead("req_1", 0.0), Principal("k", "t")))
    for sink, score in zip(answer.sinks, (1.0, 2.0, 1.0), strict=True):
        sink.deliver(Delta("r", 0, 0, finish=Finish("length", Usage(1, 0), vector=struct.pack("<f", score))))
    assert [result["index"] for result in transport.body()["results"]] == [1, 0, 2]


async def test_closed_answer_is_freed_without_the_collector(no_collector: None) -> None:
    exchange, _, transport = kept_exchange()
    request = parse_embeddings(b'{"model": "m", "input": ["a", "b"]}')
    answer = EmbeddingsAnswer(Asked(exchange, request, ResponseHead("req_1", 0.0), Principal("k", "t")))
    late = answer.sinks[1]
    answer.fail(ApiError(500, "broken"))
    # What comes too late is not told.
    late.deliver(Delta("r", 0, 0, finish=Finish("length", Usage(1, 0), vector=struct.pack("<f", 2.0))))
    assert transport.body()["error"]["message"] == "broken"
    answer.close()
    freed = weakref.ref(answer)
    del answer, late
    assert freed() is None


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
