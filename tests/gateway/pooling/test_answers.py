"""Answers of numbers on a transport that keeps what it is given."""

from __future__ import annotations

import struct
import time
import weakref

from gateway.admission.auth import Principal
from gateway.api.answer import Asked, ResponseHead
from gateway.errors import ApiError
from gateway.pooling.answers import EmbeddingsAnswer
from gateway.pooling.parsing import parse_embeddings
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
