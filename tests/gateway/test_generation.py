from __future__ import annotations

import json

import pytest

from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.generation import MAX_BYTES_AT_ONCE
from gateway.pooling.parsing import parse_rerank

MEGABYTE = 1 << 20


@pytest.mark.parametrize(("num_characters", "expected"), [(1, 128), (60_000, 128), (1_000_000, 8), (3_000_000, 2)])
def test_choices_of_a_long_prompt_are_queued_a_few_at_a_time(num_characters: int, expected: int) -> None:
    """Each carries its prompt: 128 choices of 1 MB took 480 MB of the queue's memory, and all others waited."""
    text = "x" * num_characters
    chat = {"model": "m", "messages": [{"role": "user", "content": text}], "n": 128}
    completion = {"model": "m", "prompt": text, "n": 128}
    for generation in (parse_chat(json.dumps(chat).encode()), parse_completion(json.dumps(completion).encode())):
        assert (generation.num_sequences, generation.num_at_once) == (128, expected)


def test_token_ids_count_as_they_are_sent() -> None:
    body = {"model": "m", "prompt": [1] * (MEGABYTE // 4), "n": 128}
    assert parse_completion(json.dumps(body).encode()).num_at_once == 8


def test_query_goes_with_each_document() -> None:
    body = {"model": "m", "query": "x" * (MAX_BYTES_AT_ONCE // 4), "documents": ["x"] * 2048}
    assert parse_rerank(json.dumps(body).encode()).num_at_once == 3


def test_prompt_beyond_the_bound_is_queued_alone() -> None:
    body = {"model": "m", "prompt": ["x" * (MAX_BYTES_AT_ONCE + 1), "y"]}
    assert parse_completion(json.dumps(body).encode()).num_at_once == 1
