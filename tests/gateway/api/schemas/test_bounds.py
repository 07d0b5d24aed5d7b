"""Every parameter of both endpoints: what it becomes, its bound, and the field a 400 names."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.schemas.bodies import ChatBody, CompletionBody
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.errors import ApiError
from tests.bounded_types import Leaf, Number, illegal_numbers, leaves, legal_numbers
from tests.gateway.parsed_bodies import chat, completion
from tests.gateway.refusals import refused

BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 0.5, 2, None], [-0.1, 2.1, "1", True, [1], 1e300]),
    ("top_p", [0, 1], [-0.1, 1.1, "1"]),
    ("top_k", [-1, 0, 50], [-2, 1.5, 2**31, "5"]),
    ("min_p", [0, 1], [-0.1, 1.1]),
    ("n", [1, 128], [0, -1, 129, 1.5, True, "1", 10**30]),
    ("seed", [0, -(2**63), 2**63 - 1], [2**63, 2**80, 1.5, "1"]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
    ("repetition_penalty", [0.1, 10], [0, 10.1]),
    ("max_tokens", [1, 10_000_000, -1, 7.0], [0, -2, 10_000_001, 1.5, 10**30]),
    ("stop", ["x", ["x"] * 16, [], "", [""], None], [["x"] * 17, 5, "x" * 1025]),
    ("stop_token_ids", [[1, 2]], [[-1], [2**31], [1] * 65, 5]),
    ("logit_bias", [{"5": -100, "6": 100}, {}], [{"5": 101}, {"-1": 1}, {"x": 1}, [1], {str(2**31): 1}]),
    ("stream", [True, False, None], [1, "true"]),
    ("ignore_eos", [True], [1]),
    ("user", ["me"], [5, "x" * 513, "a\0b"]),
    ("priority", [-100, 100], [-101, 101, 1.5]),
    ("timeout", [0.001, 86400], [0, -1, 86401, "5"]),
    ("model", ["org/name:tag"], ["", 5, None, "x" * 129, "é" * 65, "a\0b"]),
    ("response_format", [{"type": "text"}, {"type": "json_object"}], [{"type": "xml"}, {}, "text"]),
    ("guided_choice", [["a"], ["a"] * 4000], [[], [""], ["a"] * 4001, "a", [1]]),
    ("guided_regex", ["a+", "a" * 262144], ["", "a" * 262145, 1, "\0"]),
    ("guided_json", [{}, True, "{}"], [1, [], "[]", "x", {"a": "b" * 262144}]),
    ("best_of", [1, 128], [0, 129, 1.5]),
    ("min_tokens", [0, 16], [-1, 10_000_001, 1.5]),
    ("truncate_prompt_tokens", [1, -1], [0, -2, (1 << 20) + 1]),
    ("prompt_logprobs", [0, 20, -1], [21, -2]),
    ("allowed_token_ids", [[1, 2]], [[], [-1], 5, [1] * 65_537]),
    ("logprob_token_ids", [[]], [[-1], 5, [1] * 129, [1]]),
    ("bad_words", [["x"], []], ["x", [""], ["x" * 65], ["x"] * 65, ["a\0"]]),
    ("cache_salt", ["me"], ["", "x" * 513, "a\0b", 5]),
    ("prompt_cache_key", ["me", ""], ["x" * 257, "a\0b", 5]),
    ("prompt_cache_retention", ["in_memory", "in-memory", "24h"], ["1h", 5]),
    ("agent_hints", [{}, {"session_id": "s"}, {"drop": True}], ["drop", {"session_id": ""}, {"session_id": "a\0"}]),
    ("n_predict", [5, -1, -2], [-3, 10_000_001]),
    ("repeat_penalty", [1.1], [0, 10.1]),
]


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("name", "allowed", "forbidden"), BOUNDS, ids=[name for name, _, _ in BOUNDS])
def test_value_within_the_bound_passes_and_beyond_it_is_named(
    parse: Any, name: str, allowed: list[Any], forbidden: list[Any]
) -> None:
    for value in allowed:
        parse(**{name: value})
    for value in forbidden:
        error = refused(parse, **{name: value})
        assert error.param is not None
        assert error.param.split(".")[0] == name, (value, error.message)
        assert name in error.message


def entry(leaf: Leaf, value: Any) -> Any:
    """Return the value of a body's field that holds a number in this place."""
    if leaf.path[-1] == "keys":
        return {str(value): 1.0}
    holder = {"logit_bias": "1", "agent_hints": leaf.path[-1], "kv_budget": "tokens"}.get(leaf.path[0])
    if holder is not None:
        return {holder: value}
    return [value] if len(leaf.path) > 1 else value


@pytest.mark.parametrize(
    ("parse", "leaf"),
    [
        (parse, leaf)
        for parse, body in ((chat, ChatBody), (completion, CompletionBody))
        for leaf in leaves(body)
        if isinstance(leaf.type, Number) and leaf.path[0] != "prompt"
    ],
    ids=lambda value: ".".join(value.path) if isinstance(value, Leaf) else value.__name__,
)
def test_number_is_served_at_its_bounds_and_refused_by_name_outside_them(parse: Any, leaf: Leaf) -> None:
    assert isinstance(leaf.type, Number)
    name = leaf.path[0]

    others: dict[str, Any] = {"logprobs": True} if (parse, name) == (chat, "top_logprobs") else {}
    if name == "min_tokens":
        others = {"max_tokens": -1}
    if name == "logprob_token_ids":
        others = {"logprobs": True if parse is chat else 0}
    for value in legal_numbers(leaf.type):
        if (name, value) not in (("max_tokens", 0), ("n_predict", 0), ("truncate_prompt_tokens", 0)):
            parse(**others, **{name: entry(leaf, value)})
    for value in illegal_numbers(leaf.type):
        if leaf.path[-1] == "keys" and value in ("1", True):
            continue
        error = refused(parse, **others, **{name: entry(leaf, value)})
        # NaN and the infinities are no JSON; within a list no field can be told that they belong to.
        if len(leaf.path) == 1 or error.code != "invalid_json":
            assert error.param is not None
            assert error.param.split(".")[0] == name, (value, error.message)


def test_bound_is_said_in_the_message() -> None:
    assert refused(chat, temperature=3).message == "'temperature' is invalid: expected number <= 2.0."
    assert refused(chat, n="x").message == "'n' is invalid: expected integer or null, got string."
    with pytest.raises(ApiError, match=r"^The body is invalid: expected object, got array\."):
        parse_chat(b"[]")


@pytest.mark.parametrize("name", ["temperature", "top_p", "timeout", "repetition_penalty"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_number_that_is_not_one_is_refused_by_name(name: str, number: str) -> None:
    for prefix, parse in (
        ('"messages":[{"role":"user","content":"x"}]', parse_chat),
        ('"prompt":"x"', parse_completion),
    ):
        assert refused(parse, f'{{"model":"m",{prefix},"{name}": {number}}}'.encode()).param == name


def test_all_parameters_arrive() -> None:
    fields: dict[str, Any] = {
        "max_completion_tokens": 7,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "n": 2,
        "stop": ["a", "b"],
        "seed": 42,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 1.5},
        "logprobs": True,
        "top_logprobs": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "me",
        "priority": 5,
        "timeout": 12.5,
    }
    generation = chat(**fields)
    sampling = generation.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 40)
    assert (sampling.min_p, sampling.seed, sampling.stop, sampling.logprobs) == (0.1, 42, ("a", "b"), 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (sampling.logit_bias, sampling.ignore_eos) == ({7: 1.5}, True)
    assert (generation.n, generation.stream, generation.include_usage) == (2, True, True)
    assert (generation.priority, generation.timeout_s, generation.deterministic) == (5, 12.5, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5, "n_predict": 6}, "n_predict"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_parameters_that_contradict_each_other_are_refused(parse: Any, fields: dict[str, Any], param: str) -> None:
    assert refused(parse, **fields).param == param
    assert parse(**dict.fromkeys(fields, 2))


def test_no_limit_is_the_context() -> None:
    assert chat(max_tokens=-1).sampling.max_tokens is None
    assert completion(max_tokens=-1).sampling.max_tokens is None
    assert completion(n_predict=-2).sampling.max_tokens is None
    assert chat(max_completion_tokens=7, max_tokens=-1).sampling.max_tokens == 7


def test_minus_one_asks_for_as_many_logprobs_as_are_reported() -> None:
    assert chat(logprobs=True, top_logprobs=-1, prompt_logprobs=-1).sampling.logprobs == 20
    asked = completion(logprobs=-1, prompt_logprobs=3).sampling
    assert (asked.logprobs, asked.prompt_logprobs) == (20, 3)
    assert completion(logprobs=2, echo=True, prompt_logprobs=5).sampling.prompt_logprobs == 5


def test_seed_of_minus_one_is_none() -> None:
    assert not chat(seed=-1).deterministic
    assert len({chat(seed=-1).sampling.seed for _ in range(10)}) == 10
    assert chat(seed=-1, temperature=0) == chat(temperature=0)


def test_deterministic_is_greedy_or_seeded() -> None:
    assert chat(temperature=0).deterministic
    assert chat(seed=0).deterministic
    assert not chat().deterministic
    assert chat(temperature=0).sampling == chat(temperature=0).sampling
    assert len({chat().sampling.seed for _ in range(10)}) == 10


def test_stream_options_without_a_stream_are_refused() -> None:
    assert refused(chat, stream_options={"include_usage": True}).param == "stream_options"
    assert refused(chat, stream=True, stream_options=5).param == "stream_options"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model":"\xff"}', "invalid_json"),
        (b'{"model":"m","extra":"\xff"}', "invalid_json"),
        (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b'{"model":"m","tools":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", "invalid_json"),
        (b"[]", "invalid_value"),
        (b"null", "invalid_value"),
        (b'{"messages":[{"role":"user","content":"x"}]}', "missing_required_parameter"),
    ],
)
def test_body_that_is_no_request_is_a_400(body: bytes, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\ude00b", "\ufffdb"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\uD83D\uDE00", "\U0001f600"),
        (r"\\ud83d \ud83d", r"\ud83d " + "\ufffd"),
        (r"\\\ud83dx", "\\\ufffdx"),
    ],
)
def test_half_a_surrogate_is_read_as_no_character(written: str, text: str) -> None:
    body = f'{{"model":"m","store":true,"messages":[{{"role":"user","content":"{written}"}}]}}'.encode()
    [message] = parse_chat(body).prompts[0].messages or ()
    assert message.content == text
