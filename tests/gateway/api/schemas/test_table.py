"""Every row of the table of parameters, tested by what the row says becomes of its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, Struct
from openai.types.responses import (
    EasyInputMessageParam,
    ResponseFormatTextJSONSchemaConfigParam,
    ResponseFunctionToolCallParam,
    ResponseInputTextParam,
    ResponseOutputMessageParam,
    ResponseOutputRefusalParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
)
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from openai.types.responses.response_input_item_param import FunctionCallOutput, ItemReference
from openai.types.shared_params import Reasoning

from gateway.anthropic.names import Anthropic
from gateway.anthropic.parsing import parse_count_tokens, parse_messages
from gateway.api.schemas.bodies import ChatBody
from gateway.api.schemas.names import BodyRules, Kind, ParameterTable, Row, Use, described, rows_of
from gateway.api.schemas.parsing import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from gateway.api.schemas.unserved_names import OpenAi
from gateway.errors import ApiError
from gateway.openapi.document import TABLES
from gateway.openapi.parameters_page import parameters_page
from gateway.pooling.bodies import Pooled
from gateway.pooling.parsing import parse_embeddings, parse_rerank, parse_score
from gateway.responses.names import Responses
from tests.gateway.parsed_bodies import chat, response_of
from tests.gateway.refusals import refused

TABLE_OF = {kind: table for table in TABLES for kind in table.readers}
PAGE = Path(__file__).parents[4] / "ops/docs/parameters.md"


def parse_response(body: bytes, rules: BodyRules) -> Any:
    """Return what a response becomes, without its own id."""
    generation = response_of(body, rules)
    draft = msgspec.structs.replace(generation.draft, id="", created_at=0, input=[])
    return msgspec.structs.replace(generation, draft=draft)


PARSERS: dict[Kind, Callable[..., Any]] = {
    **dict.fromkeys(Responses, parse_response),
    **dict.fromkeys(Anthropic, parse_messages),
    OpenAi.COMPLETION: parse_completion,
    Pooled.EMBEDDINGS: parse_embeddings,
    Pooled.RERANK: parse_rerank,
    Pooled.SCORE: parse_score,
    Pooled.DOCUMENT: parse_rerank,
    OpenAi.TOKENIZE: parse_tokenize,
    OpenAi.DETOKENIZE: parse_detokenize,
    Anthropic.COUNT_TOKENS: parse_count_tokens,
}
RESPONSES, POOLING, ANTHROPIC = set(Responses), set(Pooled), set(Anthropic)
# Served, and without influence on what is generated.
CHECKED_ONLY = {"user"}
NAMES_OF_SCHEMAS = {"name", "description"}


def body(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body of whose objects one of this kind has these fields."""
    part = {"type": "text", "text": "hello", **(fields if kind is OpenAi.CONTENT_PART else {})}
    if kind is OpenAi.IMAGE_URL:
        part = {"type": "image_url", "image_url": {"url": "https://images.test/a.png", **fields}}
    role = "assistant" if kind is OpenAi.CHAT else "user"
    message = {"role": role, "content": [part], **(fields if kind is OpenAi.MESSAGE else {})}
    if kind in ANTHROPIC:
        return anthropic_body(kind, fields)
    if kind is OpenAi.COMPLETION:
        return {"model": "m", "prompt": "hello", "seed": 1, **fields}
    if kind in RESPONSES:
        return {"model": "m", "input": "hello", "seed": 1, **response_fields(kind, fields)}
    if kind in POOLING:
        return pooling_body(kind, fields)
    if kind is OpenAi.TOKENIZE:
        return {"messages": [message], **fields}
    if kind is OpenAi.DETOKENIZE:
        return {"tokens": [1], **fields}
    if kind is OpenAi.CALLED_CUSTOM:
        message["tool_calls"] = [{"id": "a", "type": "custom", "custom": {"name": "f", "input": "", **fields}}]
    if kind in (OpenAi.TOOL_CALL, OpenAi.CALLED_FUNCTION):
        called = {"name": "f", "arguments": "{}", **(fields if kind is OpenAi.CALLED_FUNCTION else {})}
        message["tool_calls"] = [{"id": "a", "function": called, **(fields if kind is OpenAi.TOOL_CALL else {})}]
    more = fields if kind is OpenAi.CHAT else fields_with(kind, fields)
    return {"model": "m", "messages": [message], "seed": 1, **more}


def fields_with(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat body that hold an object of this kind."""
    schema = {"schema": {"type": "object"}, **fields}
    function = {"name": "f", **(fields if kind is OpenAi.FUNCTION else {})}
    tool = {"type": "function", "function": function, **(fields if kind is OpenAi.TOOL else {})}
    holders: dict[Kind, dict[str, Any]] = {
        OpenAi.AGENT_HINTS: {"agent_hints": fields},
        OpenAi.STREAM_OPTIONS: {"stream": True, "stream_options": fields},
        OpenAi.CHAT_THINKING: {"thinking": {"type": "enabled", **fields}},
        OpenAi.CHAT_REASONING: {"reasoning": fields},
        OpenAi.PREDICTION: {"prediction": {"type": "content", "content": "abc", **fields}},
        OpenAi.TOOL: {"tools": [tool]},
        OpenAi.FUNCTION: {"tools": [tool]},
        OpenAi.RESPONSE_FORMAT: {"response_format": {"type": "json_object", **fields}},
        OpenAi.JSON_SCHEMA: {"response_format": {"type": "json_schema", "json_schema": schema}},
        OpenAi.STRUCTURED_OUTPUTS: {"structured_outputs": fields},
    }
    return holders.get(kind, {})


def response_fields(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a response's body that are, or hold, an object of this kind."""
    text_format = {"type": "json_schema", "schema": {"type": "object"}, **fields}
    part = {"type": "input_text", "text": "hello", **(fields if kind is Responses.PART else {})}
    item = {"role": "user", "content": [part], **(fields if kind is Responses.ITEM else {})}
    holders: dict[Kind, dict[str, Any]] = {
        Responses.ITEM: {"input": [item]},
        Responses.PART: {"input": [item]},
        Responses.REASONING: {"reasoning": fields},
        Responses.TEXT: {"text": fields},
        Responses.STREAM_OPTIONS: {"stream_options": fields},
        Responses.TEXT_FORMAT: {"text": {"format": text_format}},
    }
    return holders.get(kind, fields)


def anthropic_body(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    block = {"type": "text", "text": "hello", **(fields if kind is Anthropic.BLOCK else {})}
    if kind is Anthropic.SOURCE:
        block = {"type": "document", "source": {"type": "text", "data": "hello", **fields}}
    turn = {"role": "user", "content": [block], **(fields if kind is Anthropic.TURN else {})}
    prompt: dict[str, Any] = {"model": "m", "messages": [turn]}
    if kind is not Anthropic.COUNT_TOKENS:
        # Without it every request has a seed of its own.
        prompt |= {"max_tokens": 5, "temperature": 0}
    if kind is Anthropic.STREAM_OPTIONS:
        prompt |= {"stream": True, "stream_options": fields}
    if kind is Anthropic.OUTPUT_CONFIG:
        prompt["output_config"] = fields
    if kind is Anthropic.THINKING:
        prompt["thinking"] = {"type": "adaptive", **fields}
    return prompt | (fields if kind in (Anthropic.MESSAGES, Anthropic.COUNT_TOKENS) else {})


def pooling_body(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    document = {"text": "hello", **(fields if kind is Pooled.DOCUMENT else {})}
    whole: dict[Kind, dict[str, Any]] = {
        Pooled.EMBEDDINGS: {"model": "m", "input": "hello"},
        Pooled.SCORE: {"model": "m", "text_1": "hello", "text_2": "there"},
    }
    rerank = {"model": "m", "query": "hi", "documents": [document]}
    return whole.get(kind, rerank) | (fields if kind is not Pooled.DOCUMENT else {})


def parse(kind: Kind, fields: dict[str, Any], allow_unknown: bool = False) -> Any:
    return PARSERS.get(kind, parse_chat)(json.dumps(body(kind, fields)).encode(), BodyRules(allow_unknown))


def rows(use: Use) -> list[Any]:
    return [
        pytest.param(kind, row, id=f"{kind.name.lower()}-{row.name}")
        for kind in TABLE_OF
        for row in TABLE_OF[kind].rows(kind).values()
        if row.use is use and (use is not Use.SERVED or row.example is not None)
    ]


@pytest.mark.parametrize("kind", TABLE_OF)
def test_served_names_are_the_fields_of_the_body(kind: Kind) -> None:
    served = {name for name, row in TABLE_OF[kind].rows(kind).items() if row.use is Use.SERVED}
    assert served == set(TABLE_OF[kind].readers[kind].__struct_fields__)
    assert msgspec.inspect.type_info(TABLE_OF[kind].readers[kind]).forbid_unknown_fields  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "row"), rows(Use.SERVED))
def test_served_name_changes_what_is_generated(kind: Kind, row: Row) -> None:
    asked = parse(kind, {row.name: row.example})
    without_effect = NAMES_OF_SCHEMAS if kind is OpenAi.JSON_SCHEMA else CHECKED_ONLY
    if kind in RESPONSES:
        # Repeated in the answer.
        without_effect = set()
    assert (asked == parse(kind, {})) is (row.name in without_effect)


@pytest.mark.parametrize(("kind", "row"), rows(Use.IGNORED))
def test_ignored_name_changes_nothing(kind: Kind, row: Row) -> None:
    assert parse(kind, {row.name: row.example}) == parse(kind, {})


@pytest.mark.parametrize(("kind", "row"), rows(Use.REFUSED))
def test_refused_name_is_a_400_that_says_what_to_do_unless_it_changes_nothing(kind: Kind, row: Row) -> None:
    error = refused(parse, kind, {row.name: row.example})
    assert error.param is not None
    assert (error.param.rpartition(".")[2], error.code) == (row.name, "unsupported_parameter")
    assert error.message.endswith(row.note)
    assert f"'{error.param}'" in error.message
    for value in (None, *row.without_effect):
        assert parse(kind, {row.name: value}) == parse(kind, {})


@pytest.mark.parametrize("kind", TABLE_OF)
def test_unknown_name_is_refused_unless_it_is_null_or_the_operator_allows_it(kind: Kind) -> None:
    error = refused(parse, kind, {"no_such_name": 1})
    assert error.param is not None
    assert (error.param.rpartition(".")[2], error.code) == ("no_such_name", "unknown_parameter")
    assert parse(kind, {"no_such_name": None}) == parse(kind, {})
    assert parse(kind, {"no_such_name": {"a": 1}}, allow_unknown=True) == parse(kind, {})


def test_unknown_name_is_answered_with_the_nearest_or_with_where_it_belongs() -> None:
    misspelt = refused(parse, OpenAi.CHAT, {"temprature": 1}).message
    assert misspelt == "Unknown parameter: 'temprature'. Did you mean 'temperature'?"
    message = refused(parse, OpenAi.COMPLETION, {"messages": []}).message
    assert message == "Unknown parameter: 'messages'. It belongs to POST /v1/chat/completions."
    long = refused(parse, OpenAi.CHAT, {"x" * 1000: 1})
    assert (long.param, len(long.message) < 200) == ("x" * 128, True)


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        # Another endpoint's name is told so, even where one of this endpoint looks a little like it.
        (OpenAi.COMPLETION, "parallel_tool_calls", " It belongs to POST /v1/chat/completions."),
        (Pooled.EMBEDDINGS, "top_p", " It belongs to POST /v1/chat/completions."),
        # One thing under another server's name.
        (Pooled.EMBEDDINGS, "prompt", " Did you mean 'input'?"),
        (OpenAi.COMPLETION, "input", " Did you mean 'prompt'?"),
        (OpenAi.TOKENIZE, "content", " Did you mean 'prompt'?"),
        (Responses.RESPONSE, "max_new_tokens", " Did you mean 'max_output_tokens'?"),
        (OpenAi.CHAT, "topP", " Did you mean 'top_p'?"),
        (
            OpenAi.CHAT,
            "history",
            " Leave it out, or let the operator's `--allow-unknown-parameters` leave out all such names.",
        ),
        (OpenAi.MESSAGE, "max_tokens", ""),
    ],
)
def test_hint_about_an_unknown_name_is_no_guess(kind: Kind, name: str, hint: str) -> None:
    assert TABLE_OF[kind].hint(kind, name) == hint


def test_name_within_a_list_is_named_by_its_place() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "txt": 1}]}
    assert refused(chat, [message, message]).param == "messages.[0].content.[1].txt"


def test_body_of_too_many_names_is_refused_without_looking_at_each() -> None:
    names = ",".join(f'"n{i}":null' for i in range(200_000))
    with pytest.raises(ApiError) as caught:
        parse_chat(f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],{names}}}'.encode())
    assert (caught.value.param, caught.value.code) == ("n0", "unknown_parameter")


@pytest.mark.parametrize("number", ["256.0", "2.56e2", "25600e-2", "256"])
def test_whole_number_may_be_written_as_a_float(number: str) -> None:
    body = f'{{"model":"m","prompt":"x","max_tokens":{number}}}'.encode()
    assert parse_completion(body).sampling.max_tokens == 256


@pytest.mark.parametrize("number", ["256.5", '"256"', "1e300"])
def test_other_number_is_still_refused_by_name(number: str) -> None:
    body = f'{{"model":"m","prompt":"x","store":true,"max_tokens":{number}}}'.encode()
    assert refused(parse_completion, body).param == "max_tokens"


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (Responses.RESPONSE, ResponseCreateParamsStreaming),
        (Responses.REASONING, Reasoning),
        (Responses.TEXT, ResponseTextConfigParam),
        (Responses.TEXT_FORMAT, ResponseFormatTextJSONSchemaConfigParam),
        (Responses.ITEM, EasyInputMessageParam),
        (Responses.ITEM, ResponseOutputMessageParam),
        (Responses.ITEM, ResponseFunctionToolCallParam),
        (Responses.ITEM, FunctionCallOutput),
        (Responses.ITEM, ResponseReasoningItemParam),
        (Responses.ITEM, ItemReference),
        (Responses.PART, ResponseInputTextParam),
        (Responses.PART, ResponseOutputTextParam),
        (Responses.PART, ResponseOutputRefusalParam),
    ],
)
def test_every_name_that_openai_s_client_has_for_a_response_is_in_the_table(kind: Kind, params: type[Any]) -> None:
    names = set(params.__annotations__)
    assert len(names) >= 2
    assert names - set(TABLE_OF[kind].rows(kind)) == set()


def test_two_rows_about_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="Two rows are about 'n'"):
        ParameterTable({OpenAi.CHAT: ChatBody}, [Row("n", (OpenAi.CHAT,), "")])


def test_page_is_current() -> None:
    assert PAGE.read_text() == parameters_page(), (
        "run: python -m gateway.openapi.parameters_page > ops/docs/parameters.md"
    )


class Part(Struct):
    """What stands in a list."""

    text: str


class Body(Struct):
    """A body whose fields say what they do."""

    size: Annotated[Annotated[int, Meta(ge=1)], described("How large.", 5)]
    parts: Annotated[str | list[Part] | None, described("What it consists of.")] = None


class LargerBody(Body):
    """A body with a field that says nothing."""

    depth: Annotated[int, Meta(ge=1)] = 1


def test_field_becomes_a_row_that_knows_what_its_value_holds() -> None:
    assert rows_of(Body, OpenAi.CHAT, {Part: OpenAi.MESSAGE}) == (
        Row("size", (OpenAi.CHAT,), "How large.", 5),
        Row("parts", (OpenAi.CHAT,), "What it consists of.", holds=OpenAi.MESSAGE),
    )


def test_field_without_a_description_is_named() -> None:
    with pytest.raises(TypeError, match=r"LargerBody\.depth says nothing of itself\. Annotate it"):
        rows_of(LargerBody, OpenAi.CHAT)
