"""Messages: roles, parts, calls and results of tools, reasoning, and what is not text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.conversation import ChatMessage, ToolCall
from tests.gateway.parsed_bodies import chat as parse
from tests.gateway.refusals import refused


def conversation(messages: Any) -> Any:
    return parse(messages).prompts[0].messages


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    generation = parse([{"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": "bob"}])
    assert generation.prompts[0].messages == (
        ChatMessage(role="system", content="s"),
        ChatMessage(role="user", content="ab", name="bob", part_lengths=(1, 1)),
    )


def test_answer_begins_with_the_last_message_only_where_it_is_the_assistants_and_is_to_be_repeated() -> None:
    asked = {"role": "user", "content": "Tell me."}
    messages = [asked, {"role": "assistant", "content": "Once"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert parse(messages, **continued).details is None
    assert parse([asked], echo=True).details is None
    details = parse(messages, echo=True, **continued).details
    assert details is not None
    assert details.opening == "Once"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_known_role_passes(role: str) -> None:
    assert parse([{"role": role, "content": "x", "tool_call_id": "1"}])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "root", "content": "x"}, "messages.[1].role"),
        ({"content": "x"}, "messages.[1].role"),
        ({"role": "user"}, "messages.[1].content"),
        ({"role": "user", "content": None}, "messages.[1].content"),
        ({"role": "user", "content": 5}, "messages.[1].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.[1].content.[0].image_url",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages.[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.[1].content.[0].text"),
        ({"role": "user", "content": "x", "name": "a\0b"}, "messages.[1].name"),
        ({"role": "user", "content": "x", "name": "x" * 257}, "messages.[1].name"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.[1].tool_calls.[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages.[1].tool_calls.[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "messages.[1].tool_calls.[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{"type": "other"}]}, "messages.[1].tool_calls.[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages.[1].tool_calls.[0].custom"),
        ({"role": "assistant", "tool_calls": [{"custom": {"name": "f"}}]}, "messages.[1].tool_calls.[0].custom"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": 5}}]},
            "messages.[1].tool_calls.[0].custom.input",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1"}] * 513}, "messages.[1].tool_calls"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "a\0"}}, "messages.[1].function_call.name"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages.[1].content"),
        ({"role": "assistant", "content": [{"type": "thinking", "text": "x"}]}, "messages.[1].content"),
        ({"role": "tool", "content": "x", "tool_call_id": "a\0b"}, "messages.[1].tool_call_id"),
        ("x", "messages.[1]"),
    ],
)
def test_bad_message_is_named_by_its_place(message: Any, param: str) -> None:
    assert refused(parse, [{"role": "user", "content": "x"}, message]).param == param


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_text_part_of_every_name_is_text(kind: str) -> None:
    [message] = conversation([{"role": "user", "content": [{"type": kind, "text": "a"}]}])
    assert message.content == "a"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "a", "refusal": "b"},
        {"type": "refusal", "refusal": "b", "text": "a"},
        {"type": "thinking", "thinking": "c", "text": "a"},
    ],
)
def test_text_of_another_type_of_part_is_refused_and_not_left_out(part: dict[str, str]) -> None:
    error = refused(parse, [{"role": "assistant", "content": [part]}])
    assert error.param == "messages.[0].content"
    assert f"'{list(part)[-1]}'" in error.message
    assert conversation([{"role": "assistant", "content": [part | {list(part)[-1]: None}]}])


def test_fields_of_a_message_that_its_part_repeats_say_nothing_more() -> None:
    # As OpenAI's agents for Node send an earlier answer.
    answer = {"role": "assistant", "refusal": None, "reasoning": "hm", "reasoning_content": "hm", "tool_calls": []}
    [message] = conversation([{"role": "assistant", "content": [{"type": "text", "text": "a", **answer}]}])
    assert message == conversation([{"role": "assistant", "content": [{"type": "text", "text": "a"}]}])[0]


def test_refusal_is_content_and_thinking_is_reasoning() -> None:
    parts = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": " so"}], "closed": True},
        {"type": "output_text", "text": "a", "annotations": []},
        {"type": "refusal", "refusal": "b"},
    ]
    assert conversation([{"role": "assistant", "content": parts}, {"role": "assistant", "refusal": "no"}]) == (
        ChatMessage(role="assistant", content="ab", reasoning="hm so"),
        ChatMessage(role="assistant", content="no"),
    )


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_two_names(name: str) -> None:
    [message] = conversation([{"role": "assistant", "content": "a", name: "hm"}])
    assert message == ChatMessage(role="assistant", content="a", reasoning="hm")
    [message] = conversation([{"role": "assistant", "content": None, name: [{"type": "text", "text": "hm"}]}])
    assert message == ChatMessage(role="assistant", content="", reasoning="hm")


def test_call_with_free_text_is_told_as_a_call_of_a_function_that_takes_it() -> None:
    call = {"id": "call_1", "type": "custom", "custom": {"name": "f", "input": 'a "b"\n'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    assistant, _ = conversation([{"role": "assistant", "content": None, "tool_calls": [call]}, result])
    (told,) = assistant.tool_calls
    assert (told.id, told.name, json.loads(told.arguments)) == ("call_1", "f", {"input": 'a "b"\n'})


def test_sound_of_an_earlier_answer_is_refused_with_what_to_send_instead() -> None:
    error = refused(parse, [{"role": "assistant", "content": None, "audio": {"id": "audio_1"}}])
    assert error.param == "messages.[0].audio"
    assert "transcript" in error.message


def test_calls_and_results_of_tools_travel() -> None:
    call = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    loose = {"function": {"name": "g", "arguments": {"b": [2]}}}
    assert conversation(
        [
            {"role": "assistant", "content": None, "tool_calls": [call, loose, {"function": {"name": "h"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
            {"role": "tool", "tool_call_id": "of nobody", "content": None},
            {"role": "function", "name": "f", "content": None},
        ]
    ) == (
        ChatMessage(
            role="assistant",
            content="",
            tool_calls=(
                ToolCall(id="call_1", name="f", arguments='{"a": 1}'),
                ToolCall(id="", name="g", arguments='{"b":[2]}'),
                ToolCall(id="", name="h", arguments=""),
            ),
        ),
        ChatMessage(role="tool", content="3", tool_call_id="call_1", part_lengths=(1,)),
        ChatMessage(role="tool", content="", tool_call_id="of nobody"),
        ChatMessage(role="tool", content="", name="f"),
    )


def test_older_form_of_calls_becomes_the_newer_one() -> None:
    assert conversation(
        [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "3"},
        ]
    ) == (
        ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="call_0", name="f", arguments="{}"),)),
        ChatMessage(role="tool", content="3", name="f", tool_call_id="call_0"),
    )


def test_number_of_messages_is_bounded() -> None:
    assert refused(parse, []).param == "messages"
    assert refused(parse, [{"role": "user", "content": "x"}] * 4097).param == "messages"


def test_logprobs_need_the_switch() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert parse(messages, logprobs=True).sampling.logprobs == 0
    assert parse(messages, logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert parse(messages, logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert refused(parse, messages, top_logprobs=3).param == "top_logprobs"
    assert refused(parse, messages, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(parse, messages, logprobs=3).param == "logprobs"


def test_output_is_unbounded_unless_asked_for() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert parse(messages).sampling.max_tokens is None
    assert parse(messages, max_tokens=5).sampling.max_tokens == 5
    assert parse(messages, max_tokens=5, max_completion_tokens=6).sampling.max_tokens == 6
    assert refused(parse, messages, max_completion_tokens=0).param == "max_completion_tokens"


def test_estimate_grows_with_bytes() -> None:
    short, long = (parse([{"role": "user", "content": text}]).estimated_prompt_tokens for text in ("é", "é" * 350))
    assert (short, long) == (5, 204)


@pytest.mark.parametrize(
    "content", ["the old text", [{"type": "text", "text": "the "}, {"type": "text", "text": "old text"}]]
)
def test_prediction_is_passed_on_as_text(content: Any) -> None:
    generation = parse([{"role": "user", "content": "x"}], prediction={"type": "content", "content": content})
    assert generation.prediction == "the old text"
    assert parse([{"role": "user", "content": "x"}], prediction=None).prediction is None


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "diff", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ("x", "prediction"),
    ],
)
def test_bad_prediction_is_refused(prediction: Any, param: str) -> None:
    assert refused(parse, [{"role": "user", "content": "x"}], prediction=prediction).param == param


def test_content_may_hold_any_character() -> None:
    # Data sets of random tokens, such as that of vLLM's benchmark, have them all.
    messages = conversation(
        [{"role": "user", "content": "a\0b"}, {"role": "assistant", "content": "", "reasoning": "\0"}]
    )
    assert [message.content for message in messages] == ["a\0b", ""]


def test_what_openai_says_of_caches_passes() -> None:
    parts = [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}]
    generation = parse([{"role": "user", "content": parts}], prompt_cache_options={"mode": "implicit"}, moderation=None)
    assert generation.prompts[0].messages == (ChatMessage(role="user", content="a", part_lengths=(1,)),)
    assert refused(parse, [{"role": "user", "content": "a"}], moderation={"model": "m"}).code == "unsupported_parameter"
