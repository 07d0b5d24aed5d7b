"""Bodies as generations that can be stored: those that no one writes by hand, formats of the text, and names."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.responses.body import ResponseBody, TextFormatBody, repeated_format, text_output
from gateway.responses.draft import ResponseDraft, ResponseGeneration, response_fields
from gateway.responses.items import input_item_id, is_response_id, new_response_id, output_item_id, response_of
from gateway.responses.request import own_items, parse_body, to_generation
from shared.formats.tools import ToolChoice
from tests.gateway.parsed_bodies import response as response_to
from tests.gateway.parsed_bodies import response_of as generation_of
from tests.gateway.refusals import refused

NAMES = ResponseBody.__struct_fields__
SCALARS: tuple[Any, ...] = (None, True, 0, -1, 1.5, 1e300, 256.0, "", "x", "a\0b", "\ud83d\ude00", 2**70, -(2**70))
_WORDS = (
    "auto none required function message reasoning function_call function_call_output item_reference json_schema "
    "json_object text user assistant system allowed_tools web_search input_text low"
)
_KEYS = (
    "type role content id call_id name arguments output summary encrypted_content text format schema strict parameters "
    "description mode tools namespace effort verbosity refusal other"
)


WORDS, KEYS = (list(map(str, names.split())) for names in (_WORDS, _KEYS))


def value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > 4 or kind < 0.15:
        return chance.choice(SCALARS)
    if kind < 0.35:
        return chance.choice(WORDS)
    if kind < 0.5:
        return [value(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    return {chance.choice(KEYS): value(chance, depth + 1) for _ in range(chance.randint(0, 6))}


def check(body: dict[str, Any]) -> bool:
    """Return whether a body is accepted; whatever is refused otherwise than by a 400 counts as a failure."""
    try:
        draft = generation_of(json.dumps(body).encode()).draft
    except ApiError as error:
        if error.status != 400:
            raise
        return False
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(draft), type=ResponseDraft) == draft
    response = json.loads(msgspec.json.encode(response_fields(draft, "queued")))
    assert (response["id"], response["status"]) == (draft.id, "queued")
    return True


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_body_made_by_chance_is_accepted_or_refused(count: int) -> None:
    chance = random.Random(5)
    num_accepted = 0
    for _ in range(count):
        body = {"model": "m", "input": chance.choice(("x", value(chance), [{"role": "user", "content": "x"}]))}
        body |= {chance.choice(NAMES): value(chance, 1) for _ in range(chance.randint(0, 3))}
        num_accepted += check({"model": "m"} | body)
    assert num_accepted > count / 20


def test_numbers_of_a_schema_are_repeated_as_they_were_written() -> None:
    schema = {"type": "object", "properties": {"a": {"maximum": 10**40, "minimum": 1.0}}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    assert check({"model": "m", "input": "x", "tools": [tool], "text": text})
    draft = response_to(tools=[tool], text=text).draft
    response = json.loads(msgspec.json.encode(response_fields(draft, "queued")))
    assert (response["tools"][0]["parameters"], response["text"]["format"]["schema"]) == (schema, schema)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def body(**fields: Any) -> TextFormatBody:
    return msgspec.json.decode(msgspec.json.encode(fields), type=TextFormatBody)


@pytest.mark.parametrize("asked", [None, body(type="text")])
def test_text_may_be_anything_where_nothing_else_is_asked(asked: TextFormatBody | None) -> None:
    assert text_output(asked) is None
    assert repeated_format(asked) == {"type": "text"}


def test_object_is_a_schema_of_its_own() -> None:
    output = text_output(body(type="json_object"))
    assert output is not None
    assert output.field == "text.format"
    assert (output.grammar.kind, msgspec.json.decode(output.grammar.source)) == ("json_schema", {"type": "object"})
    assert repeated_format(body(type="json_object")) == {"type": "json_object"}


@pytest.mark.parametrize("strict", [True, False, None])
def test_schema_is_obeyed_and_repeated(strict: bool | None) -> None:
    asked = body(type="json_schema", name="n", description="d", schema=SCHEMA, strict=strict)
    output = text_output(asked)
    assert output is not None
    assert output.field == "text.format.schema"
    assert (output.grammar.strict, msgspec.json.decode(output.grammar.source)) == (bool(strict), SCHEMA)
    repeated = msgspec.json.decode(msgspec.json.encode(repeated_format(asked)))
    assert repeated == {
        "type": "json_schema",
        "name": "n",
        "strict": bool(strict),
        "description": "d",
        "schema": SCHEMA,
    }
    assert repeated_format(body(type="json_schema", schema=SCHEMA))["name"] == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"type": "xml"}, "text.format.type"),
        ({"type": "json_schema"}, "text.format.schema"),
        ({"type": "json_schema", "schema": None}, "text.format.schema"),
    ],
)
def test_format_that_is_unknown_or_not_complete_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(text_output, body(**fields)).param == param


def test_item_names_its_response_and_its_place() -> None:
    response = new_response_id()
    assert re.fullmatch(r"resp_[0-9a-f]{32}", response)
    assert new_response_id() != response
    suffix = response.removeprefix("resp_")
    assert output_item_id("msg", response, 0) == f"msg_{suffix}0000"
    assert output_item_id("fc", response, 0x1F) == f"fc_{suffix}001f"
    # Items of the input never have the id of one of the output.
    assert input_item_id("msg", response, 1) == f"msg_{suffix}8001"
    for item in (output_item_id("msg", response, 7), input_item_id("rs", response, 70_000)):
        assert response_of(item) == response


@pytest.mark.parametrize(
    "text", ["", "resp_", "resp_" + "0" * 31, "resp_" + "0" * 33, "resp_" + "G" * 32, "x" + "resp_" + "0" * 32]
)
def test_text_that_is_no_id_is_none(text: str) -> None:
    assert not is_response_id(text)
    assert response_of(text) is None
    assert is_response_id("resp_" + "0" * 32)
    for digits in (35, 41):
        assert response_of("msg_" + "0" * digits) is None
    for digits in (36, 40):
        assert response_of("msg_" + "0" * digits) == "resp_" + "0" * 32


TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
# What OpenAI's own server says of a request that names nothing but its model and its input.
DEFAULTS = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {}, "model": "m",
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None}, "safety_identifier": None, "service_tier": "default",
    "temperature": None, "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto",
    "tools": [], "top_logprobs": 0, "top_p": None, "truncation": "disabled", "user": None,
}  # fmt: skip


def asked(**fields: Any) -> ResponseGeneration:
    body = parse_body(json.dumps({"model": "m", "input": "x"} | fields).encode())
    return to_generation(body, [], own_items(body), ("resp_before",))


def test_request_of_nothing_but_a_text_has_the_defaults() -> None:
    generation = asked()
    draft = generation.draft
    assert json.loads(draft.parameters) == DEFAULTS
    assert (draft.is_stored, draft.is_background, draft.has_encrypted_reasoning) == (True, False, False)
    assert draft.ancestors == ("resp_before",)
    [item] = draft.input
    assert (item.type, item.status, item.role, item.content) == ("message", "completed", "user", "x")
    assert (item.id or "").startswith("msg_")
    assert (generation.sampling.max_tokens, generation.sampling.logprobs) == (None, None)
    assert (generation.stream, generation.priority, generation.timeout_s, generation.tools) == (False, 0, None, None)


def test_parameters_reach_the_model_and_are_repeated() -> None:
    fields: dict[str, Any] = {
        "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_logprobs": 3, "metadata": {"a": "b"},
        "user": "u", "parallel_tool_calls": False, "max_tool_calls": 2, "prompt_cache_key": "k",
        "safety_identifier": "s", "previous_response_id": "resp_before",
    }  # fmt: skip
    more = {"stream": True, "store": False, "priority": 2, "timeout": 5, "instructions": "Be brief."}
    shape = {"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}}
    generation = asked(**fields, **more, **shape, include=["reasoning.encrypted_content"])
    sampling, draft = generation.sampling, generation.draft
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.logprobs) == (9, 0.5, 0.9, 3)
    assert (generation.stream, generation.priority, generation.timeout_s) == (True, 2, 5)
    repeated = {
        "instructions": "Be brief.",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": None},
    }
    assert json.loads(draft.parameters) == DEFAULTS | fields | repeated
    assert (draft.is_stored, draft.has_encrypted_reasoning) == (False, True)
    [prompt] = generation.prompts
    assert [(message.role, message.content) for message in prompt.messages or ()] == [
        ("system", "Be brief."), ("user", "x"),
    ]  # fmt: skip
    assert prompt.chat is not None
    variables = json.loads(prompt.chat.variables or "")
    assert (variables["reasoning_effort"], variables["verbosity"]) == ("low", "low")


def test_log_probabilities_may_be_asked_for_without_alternatives() -> None:
    assert asked(include=["message.output_text.logprobs"]).sampling.logprobs == 0


@pytest.mark.parametrize(("mode", "choice"), [({}, ToolChoice("auto")), ({"mode": "required"}, ToolChoice("required"))])
def test_only_allowed_tools_are_offered(mode: dict[str, str], choice: ToolChoice) -> None:
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]} | mode
    use = asked(tools=TOOLS, tool_choice=allowed).tools
    assert use is not None
    assert ([tool.name for tool in use.tools], use.choice) == (["g"], choice)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"background": True, "top_logprobs": 1}, "top_logprobs", "unsupported_parameter"),
        ({"background": True, "include": ["message.output_text.logprobs"]}, "top_logprobs", "unsupported_parameter"),
        ({"background": True, "store": False}, "store", "invalid_value"),
        ({"include": ["everything"]}, "include", "invalid_value"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools", "invalid_value"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp", "name": "f"}]}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported_parameter"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools.[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools.[0].name", "missing_required_parameter"),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_code(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(asked, **{"tools": TOOLS} | fields)
    assert (error.param, error.code) == (param, code)
