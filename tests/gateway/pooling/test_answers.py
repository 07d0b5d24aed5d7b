"""Answers of numbers on a transport that keeps what it is given."""

from __future__ import annotations

import struct
import time
import weakref
from typing import Any

import msgspec
import pytest

from gateway.admission.auth import Principal
from gateway.api.answer import Asked, ResponseHead
from gateway.errors import ApiError
from gateway.pooling.answers import EmbeddingsAnswer, RerankAnswer, ScoreAnswer
from gateway.pooling.parsing import parse_embeddings, parse_rerank, parse_score
from shared.messages import Delta, Finish, Usage
from tests.gateway.kept_exchange import kept_exchange


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
