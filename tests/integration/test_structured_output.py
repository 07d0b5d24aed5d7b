"""Structured output through the whole system, asked for by the official SDK: every answer matches."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.integration.system import System

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Describe a person."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12, "pattern": '^[^"]*$'},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def ask(system: System, **fields: Any) -> Any:
    """Ask for a chat answer, at most 400 tokens long."""
    asked = {"model": system.model, "messages": MESSAGES, "max_tokens": 400} | fields
    return system.client().chat.completions.create(**asked)


def streamed(chunks: Any) -> tuple[str, str | None]:
    text, finish = "", None
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


@pytest.mark.parametrize("temperature", [0, 1])
def test_documents_of_a_schema_match_it_whole_and_streamed(system: System, temperature: int) -> None:
    for seed in range(4):
        asked: dict[str, Any] = {"response_format": FORMAT, "temperature": temperature, "seed": seed}
        asked |= {"extra_headers": {"Cache-Control": "no-cache"}}
        whole = ask(system, **asked).choices[0]
        text, finish = streamed(ask(system, **asked, stream=True))
        assert (text, finish) == (whole.message.content, whole.finish_reason)
        assert finish == "stop"
        jsonschema.validate(json.loads(text), PERSON)


def test_choices_and_logprobs_follow_the_grammar(system: System) -> None:
    answer = ask(system, n=3, seed=5, logprobs=True, top_logprobs=2, response_format=FORMAT)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
        assert choice.logprobs.content
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content


def test_document_that_is_cut_off_says_so(system: System) -> None:
    answer = ask(system, max_tokens=4, response_format=FORMAT, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.choices[0].message.content or "").startswith("{")


def test_class_of_pydantic_is_filled_by_the_sdk(system: System) -> None:
    class Step(BaseModel):
        done: bool
        number: int | None

    class Plan(BaseModel):
        first: Step
        second: Step

    parsed = system.client().chat.completions.parse(
        model=system.model, messages=MESSAGES, response_format=Plan, max_tokens=300, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Plan)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-z]{3}-[0-9]{4}"}, "[a-z]{3}-[0-9]{4}"),
        ({"guided_choice": ["yes", "no.", "a|b"]}, r"yes|no\.|a\|b"),
        ({"structured_outputs": {"choice": ["red", "reddish"]}}, "red|reddish"),
        ({"structured_outputs": {"regex": "(ab){2,3}c"}}, "(ab){2,3}c"),
        ({"grammar": 'root ::= "(" [0-9]{1,3} ("," [0-9]{1,3}){2} ")"'}, r"\((\d{1,3},){2}\d{1,3}\)"),
        ({"guided_grammar": 'start: "<" NAME ">"\nNAME: /[a-z]{2,5}/'}, "<[a-z]{2,5}>"),
    ],
)
def test_forms_of_other_servers_constrain_chat_and_completions(
    system: System, fields: dict[str, Any], pattern: str
) -> None:
    chat = ask(system, max_tokens=64, seed=3, extra_body=fields)
    text = system.client().completions.create(model=system.model, prompt="x", max_tokens=64, seed=3, extra_body=fields)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    assert re.fullmatch(pattern, text.choices[0].text)


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_mode_of_json_gives_an_object(system: System, fields: dict[str, Any]) -> None:
    answer = ask(system, max_tokens=500, seed=2, extra_body=fields)
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, ["properties.a", "'not'"]),
        (
            {"type": "array", "items": {"type": "array", "items": {"type": "array", "uniqueItems": True}}},
            ["items.items"],
        ),
        ({"$ref": "https://example.org/schema.json"}, ["https://example.org/schema.json"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, ["finite length"]),
        ({"enum": [f"v{index}" for index in range(10_000)]}, ["enum", "10000", "4000"]),
        ({"description": "x" * 1_000_000}, ["1000", "262144"]),
    ],
)
def test_schema_that_cannot_be_obeyed_is_refused_with_the_reason(system: System, schema: Any, words: list[str]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(system, response_format=FORMAT | {"json_schema": {"name": "n", "schema": schema, "strict": True}})
    assert (refused.value.param or "").startswith("response_format.json_schema.schema")
    assert all(word in refused.value.message for word in words), refused.value.message


@pytest.mark.parametrize(
    ("field", "grammar", "reason"),
    [
        ("guided_regex", r"[^\s\S]", "matches no text"),
        ("guided_grammar", "root ::= a\na ::= b\nb ::= a", "matches no text"),
        ("guided_json", {"type": "integer", "multipleOf": 20_023}, "'multipleOf' is too large"),
    ],
)
def test_refused_grammar_is_a_400_about_the_field_that_was_sent(
    system: System, field: str, grammar: Any, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(system, max_tokens=4, extra_body={field: grammar})
    assert refused.value.param == field
    assert str(refused.value.body["message"]).startswith(f"{field}: ")  # type: ignore[index]
    assert reason in refused.value.message
