"""`text.format`, and ids of items."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from gateway.responses.body import TextFormatBody, repeated_format, text_output
from gateway.responses.items import input_item_id, is_response_id, new_response_id, output_item_id, response_of
from tests.gateway.refusals import refused

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
