"""Prompts in their four forms, echo and log probabilities."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.schemas.parsing import parse_tokenize
from shared.conversation import ChatOptions
from tests.gateway.parsed_bodies import completion as parse
from tests.gateway.refusals import refused


def test_each_form_of_prompt_becomes_prompts() -> None:
    assert [p.text for p in parse("abc").prompts] == ["abc"]
    assert [p.text for p in parse(["a", "b"]).prompts] == ["a", "b"]
    assert [p.token_ids for p in parse([1, 2]).prompts] == [(1, 2)]
    assert [p.token_ids for p in parse([[1, 2], [3]]).prompts] == [(1, 2), (3,)]
    assert parse([[1, 2], [3]]).estimated_prompt_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[1], []], "prompt.[1]"),
        (["a", 1], "prompt"),
        ([1, [2]], "prompt"),
        ([-1], "prompt.[0]"),
        ([[1, -1]], "prompt.[0].[1]"),
        ([2**31], "prompt.[0]"),
        ([1.5], "prompt.[0]"),
        ([True], "prompt.[0]"),
        ([[["a"]]], "prompt.[0].[0]"),
        ({}, "prompt"),
        (None, "prompt"),
    ],
)
def test_bad_prompt_is_named_by_its_place(prompt: Any, param: str) -> None:
    assert refused(parse, prompt).param == param


def test_prompts_times_choices_is_bounded() -> None:
    assert parse(["a"] * 64, n=2).num_sequences == 128
    assert refused(parse, ["a"] * 65, n=2).param == "n"
    assert refused(parse, ["a"] * 129).param == "n"
    assert parse([1] * 1000, n=128).num_sequences == 128


def test_output_is_sixteen_tokens_unless_asked_for() -> None:
    assert parse("a").sampling.max_tokens == 16
    assert refused(parse, "a", max_tokens=0).param == "max_tokens"
    assert parse("a", max_tokens=0, echo=True).sampling.max_tokens == 0


def test_echo_with_logprobs_asks_for_the_prompts_too() -> None:
    plain, echo = parse("a", logprobs=2), parse("a", logprobs=2, echo=True)
    assert (plain.sampling.logprobs, plain.sampling.prompt_logprobs, plain.echo) == (2, None, False)
    assert (echo.sampling.logprobs, echo.sampling.prompt_logprobs, echo.echo) == (2, 2, True)
    assert refused(parse, "a", logprobs=21).param == "logprobs"
    assert refused(parse, "a", logprobs=True).param == "logprobs"
    assert parse("a", echo=True).sampling.prompt_logprobs is None


def test_empty_text_is_passed_on() -> None:
    assert [prompt.text for prompt in parse(["", "a"]).prompts] == ["", "a"]


def test_suffix_goes_with_texts_only() -> None:
    assert [prompt.suffix for prompt in parse(["a", "b"], suffix="c").prompts] == ["c", "c"]
    assert parse("a", suffix="").prompts[0].suffix is None
    assert refused(parse, [1, 2], suffix="c").param == "suffix"


def test_truncated_prompt_is_estimated_as_what_counts() -> None:
    prompts = parse(["x" * 4000, "x"], truncate_prompt_tokens=10).prompts
    assert [prompt.estimated_tokens for prompt in prompts] == [10, 1]
    assert parse("x" * 4000, truncate_prompt_tokens=-1).prompts[0].estimated_tokens > 1000


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TOOL = '[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}]'


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, None),
        ({"tools": None, "continue_final_message": False, "chat_template_kwargs": {}}, None),
        ({"add_generation_prompt": False}, ChatOptions(add_generation_prompt=False)),
        ({"continue_final_message": True}, ChatOptions(add_generation_prompt=False, continue_final_message=True)),
        ({"chat_template": "{{ messages }}"}, ChatOptions(template="{{ messages }}")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ChatOptions(variables='{"enable_thinking":false}')),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, ChatOptions(tools=TOOL)),
    ],
)
def test_what_the_template_gets_is_passed_on(fields: dict[str, Any], options: ChatOptions | None) -> None:
    _, call, _ = parse_tokenize(msgspec.json.encode({"messages": MESSAGES, **fields}))
    assert call.chat == options


def test_name_of_a_model_that_is_too_long_for_a_subject_is_refused() -> None:
    assert refused(parse_tokenize, msgspec.json.encode({"model": "é" * 100, "prompt": "x"})).param == "model"


def test_parameter_that_is_not_served_is_refused_unless_it_changes_nothing() -> None:
    body = msgspec.json.encode({"messages": MESSAGES, "return_token_strs": True})
    assert refused(parse_tokenize, body).param == "return_token_strs"
    _, call, _ = parse_tokenize(msgspec.json.encode({"messages": MESSAGES, "return_token_strs": False}))
    assert call.messages is not None
