"""Bodies of embeddings, reranking and scores: what they become, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.schemas.checks import estimate_tokens
from gateway.generation import Generation
from gateway.pooling.parsing import parse_embeddings, parse_rerank, parse_score
from shared.bounds import MAX_INPUTS
from tests.gateway.refusals import refused

EMBED: dict[str, Any] = {"model": "m", "input": "hello"}
RERANK: dict[str, Any] = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}]}
SCORE: dict[str, Any] = {"model": "m", "text_1": "q", "text_2": ["a", "b"]}


def encoded(base: dict[str, Any], fields: dict[str, Any]) -> bytes:
    return json.dumps(base | fields).encode()


@pytest.mark.parametrize(
    ("given", "texts", "tokens"),
    [
        ("hello", ["hello"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([5, 6], [None], [(5, 6)]),
        ([[5, 6], [7]], [None, None], [(5, 6), (7,)]),
    ],
)
def test_inputs_of_every_form_become_prompts(given: Any, texts: list[Any], tokens: list[Any]) -> None:
    request = parse_embeddings(encoded(EMBED, {"input": given}))
    assert [prompt.text for prompt in request.prompts] == texts
    assert [prompt.token_ids for prompt in request.prompts] == tokens
    assert (request.task, request.deterministic, request.sampling.max_tokens) == ("embed", True, 0)


def test_documents_are_scored_for_one_query() -> None:
    request = parse_rerank(encoded(RERANK, {"top_n": 0}))
    assert [(prompt.query, prompt.text) for prompt in request.prompts] == [("q", "a"), ("q", "b")]
    assert (request.task, request.top_n, request.returns_documents) == ("score", None, True)


def test_limits_count_the_query_with_each_of_its_texts() -> None:
    query, texts = "q" * 400, ["a" * 4000, "b"]
    request = parse_rerank(encoded(RERANK, {"query": query, "documents": texts}))
    expected = [estimate_tokens(query) + estimate_tokens(text) for text in texts]
    assert [prompt.estimated_tokens for prompt in request.prompts] == expected
    request = parse_score(encoded(SCORE, {"text_1": query, "text_2": texts}))
    assert [prompt.estimated_tokens for prompt in request.prompts] == expected
    request = parse_embeddings(encoded(EMBED, {"input": texts}))
    assert [prompt.estimated_tokens for prompt in request.prompts] == list(map(estimate_tokens, texts))


def test_teis_form_of_reranking_is_served() -> None:
    given = {"query": "q", "texts": ["a", "b"], "raw_scores": True, "return_text": True, "truncate": False}
    request = parse_rerank(json.dumps({"model": "m", **given}).encode())
    assert [(prompt.query, prompt.text) for prompt in request.prompts] == [("q", "a"), ("q", "b")]
    assert request.pooling is not None
    assert (request.pooling.raw, request.returns_documents, request.is_plain_list) == (True, True, True)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"truncate_prompt_tokens": 7}, 7),
        ({"truncate_prompt_tokens": -1}, -1),
        ({"truncate": True}, -1),
        ({"truncate": "END", "truncate_prompt_tokens": 7}, 7),
        ({"truncate": "NONE"}, None),
        ({"truncation_side": "right"}, None),
    ],
)
def test_texts_may_be_cut_at_their_end(fields: dict[str, Any], limit: int | None) -> None:
    for parse, base in ((parse_embeddings, EMBED), (parse_rerank, RERANK), (parse_score, SCORE)):
        assert parse(encoded(base, fields)).truncate_prompt_tokens == limit


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"truncate": "START"}, "truncate")],
)
def test_texts_are_not_cut_away_or_at_their_begin(fields: dict[str, Any], param: str) -> None:
    assert refused(parse_embeddings, encoded(EMBED, fields)).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"texts": ["a"], "documents": ["a"]}, "documents"),
        ({"texts": ["a"], "top_n": 1}, "top_n"),
        ({"documents": ["a"], "raw_scores": True}, "raw_scores"),
        ({}, "documents"),
        ({"texts": [""]}, "texts.[0]"),
        ({"texts": []}, "texts"),
    ],
)
def test_forms_of_reranking_are_not_mixed(fields: dict[str, Any], param: str) -> None:
    assert refused(parse_rerank, json.dumps({"model": "m", "query": "q", **fields}).encode()).param == param


def test_input_type_goes_with_texts_alone() -> None:
    request = parse_embeddings(encoded(EMBED, {"input_type": "query"}))
    assert request.pooling is not None
    assert request.pooling.input_type == "query"
    assert refused(parse_embeddings, encoded(EMBED, {"input": [5, 6], "input_type": "query"})).param == "input_type"


@pytest.mark.parametrize(
    ("queries", "texts", "pairs"),
    [
        ("q", "a", [("q", "a")]),
        ("q", ["a", "b"], [("q", "a"), ("q", "b")]),
        (["q"], ["a", "b"], [("q", "a"), ("q", "b")]),
        (["q", "r"], ["a", "b"], [("q", "a"), ("r", "b")]),
    ],
)
def test_texts_are_paired(queries: Any, texts: Any, pairs: list[tuple[str, str]]) -> None:
    request = parse_score(encoded(SCORE, {"text_1": queries, "text_2": texts}))
    assert [(prompt.query, prompt.text) for prompt in request.prompts] == pairs


@pytest.mark.parametrize(
    ("parse", "base", "fields", "param"),
    [
        (parse_embeddings, EMBED, {"input": ""}, "input"),
        (parse_embeddings, EMBED, {"input": []}, "input"),
        (parse_embeddings, EMBED, {"input": ["a", ""]}, "input.[1]"),
        (parse_embeddings, EMBED, {"input": [[1], []]}, "input.[1]"),
        (parse_embeddings, EMBED, {"input": ["a", 1]}, "input"),
        (parse_embeddings, EMBED, {"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        (parse_embeddings, EMBED, {"dimensions": 0}, "dimensions"),
        (parse_embeddings, EMBED, {"encoding_format": "int8"}, "encoding_format"),
        (parse_embeddings, EMBED, {"model": "é" * 100}, "model"),
        (parse_embeddings, EMBED, {"user": "a\0b"}, "user"),
        (parse_rerank, RERANK, {"documents": []}, "documents"),
        (parse_rerank, RERANK, {"documents": ["a", {"text": ""}]}, "documents.[1]"),
        (parse_rerank, RERANK, {"documents": ["a"] * (MAX_INPUTS + 1)}, "documents"),
        (parse_rerank, RERANK, {"query": ""}, "query"),
        (parse_rerank, RERANK, {"top_n": -1}, "top_n"),
        (parse_score, SCORE, {"text_1": ["q", "r", "s"]}, "text_1"),
        (parse_score, SCORE, {"text_1": ["q", "r"], "text_2": "a"}, "text_1"),
        (parse_score, SCORE, {"text_1": "q", "text_2": ["a", ""]}, "text_2.[1]"),
        (parse_score, SCORE, {"instruction": ""}, "instruction"),
    ],
)
def test_refusal_names_the_field(
    parse: Callable[[bytes], Generation], base: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    assert refused(parse, encoded(base, fields)).param == param


@pytest.mark.parametrize(("given", "priority"), [(b"", 0), (b', "priority": null', 0), (b', "priority": 3', 3)])
def test_priority_is_that_of_the_body_or_none(given: bytes, priority: int) -> None:
    assert parse_score(b'{"model": "m", "text_1": "a", "text_2": "b"' + given + b"}").priority == priority


def test_what_a_body_says_is_taken_over() -> None:
    request = parse_embeddings(encoded(EMBED, {"normalize": False, "timeout": 5, "input": ["a"] * MAX_INPUTS}))
    assert request.pooling is not None
    assert (request.pooling.normalize, request.timeout_s, len(request.prompts)) == (False, 5.0, MAX_INPUTS)
    assert parse_rerank(b'{"model": "m", "query": "q", "texts": ["a"], "return_documents": false}').is_plain_list
