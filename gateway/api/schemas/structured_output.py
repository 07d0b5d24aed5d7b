"""The parameters that constrain the form of an answer, and the grammar that they become.

OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`, llama.cpp's `grammar` and `json_schema`.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.api.schemas.checks import given, invalid_value, missing_parameter, require_text, unsupported_parameter
from gateway.api.schemas.names import described
from gateway.api.schemas.shared_fields import CacheFields
from gateway.generation import StructuredOutput
from shared.grammar import Grammar
from shared.grammar.bounds import MAX_ALTERNATIVES, MAX_CHARACTERS
from shared.grammar.grammar_text import looks_like_lark
from shared.sampling import Sampling

Text = Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS)]
Choices = Annotated[list[Text], Meta(min_length=1, max_length=MAX_ALTERNATIVES)]

_ANY_OBJECT = '{"type":"object"}'
# The types of `response_format`, and what may stand beside each.
_FORMATS = MappingProxyType(
    {"text": (), "json_object": ("schema", "value"), "json_schema": ("json_schema",), "json": ("value",)}
)
# Characters that mean something in a regular expression.
_ESCAPED = {ord(character): f"\\{character}" for character in r"\.+*?()|[]{}^$#&-~"}


class JsonSchemaBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A schema with its name, which says nothing about the answer."""

    name: Annotated[
        Annotated[str, Meta(max_length=256)] | None, described("A name for the reader, without influence.", "thing")
    ] = None
    description: Annotated[str | None, described("A note for the reader, without influence.", "A thing.")] = None
    schema: Annotated[Raw | UnsetType, described("The JSON schema that the answer matches.", {"type": "array"})] = UNSET
    strict: Annotated[
        bool | None, described("Refuse a `oneOf` whose alternatives may overlap, instead of `anyOf`.", True)
    ] = None


class ResponseFormatBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's way. `schema` beside `json_object` is llama.cpp's; `value`, and the type `json`, are Hugging Face's."""

    type: Annotated[
        Annotated[str, Meta(max_length=64)], described("`text`, `json_object` or `json_schema`; `json` with a `value`.")
    ]
    json_schema: Annotated[JsonSchemaBody | None, described("The schema, with `json_schema`.")] = None
    schema: Annotated[
        Raw | UnsetType, described("A schema beside `json_object`.", {"type": "object", "maxProperties": 0})
    ] = UNSET
    value: Annotated[
        Raw | UnsetType, described("The same, as Hugging Face's clients write it.", {"type": "object"})
    ] = UNSET


class StructuredOutputsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The way of vLLM."""

    json: Annotated[Raw | UnsetType, described("A JSON schema that the answer matches.", {"type": "object"})] = UNSET
    regex: Annotated[Text | None, described("A regular expression that the answer matches.", "a+")] = None
    choice: Annotated[Choices | None, described("Texts, one of which is the answer.", ["yes", "no"])] = None
    grammar: Annotated[Text | None, described("A grammar in GBNF or Lark that the answer matches.", 'root ::= "a"')] = (
        None
    )
    json_object: Annotated[bool | None, described("The answer is a JSON object.", True)] = None


class StructuredOutputFields(CacheFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of a body that constrain the form of its answer. A body has at most one of them."""

    response_format: Annotated[
        ResponseFormatBody | None, described("The answer is JSON, or matches a schema.", {"type": "json_object"})
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsBody | None,
        described(
            "The same in the form of vLLM, and regular expressions, choices and grammars.", {"json_object": True}
        ),
    ] = None
    guided_json: Annotated[Raw | UnsetType, described("A JSON schema that the answer matches.", {"type": "object"})] = (
        UNSET
    )
    guided_regex: Annotated[Text | None, described("A regular expression that the answer matches.", "a+")] = None
    guided_choice: Annotated[Choices | None, described("Texts, one of which is the answer.", ["yes", "no"])] = None
    guided_grammar: Annotated[
        Text | None, described("A grammar in GBNF or Lark that the answer matches.", 'root ::= "a"')
    ] = None
    json_schema: Annotated[Raw | UnsetType, described("A JSON schema that the answer matches.", {"type": "object"})] = (
        UNSET
    )
    grammar: Annotated[
        Annotated[str, Meta(max_length=MAX_CHARACTERS)] | None,
        described("A grammar in GBNF or Lark that the answer matches; empty for none.", 'root ::= "a"'),
    ] = None


_FIELDS = StructuredOutputFields.__struct_fields__[len(CacheFields.__struct_fields__) :]
_asked = attrgetter(*_FIELDS)
_NOTHING = _asked(StructuredOutputFields())


def asked_output(body: StructuredOutputFields) -> StructuredOutput | None:
    """Return the form that the answer must have; None for any."""
    if _asked(body) == _NOTHING:
        return None
    asked = [*_of_response_format(body.response_format), *_of_structured_outputs(body.structured_outputs)]
    asked += _of_schema("guided_json", body.guided_json)
    asked += _of_texts("guided_regex", body.guided_regex, "guided_choice", body.guided_choice)
    asked += _of_grammar("guided_grammar", body.guided_grammar)
    asked += _of_schema("json_schema", body.json_schema)
    # An empty one is how clients of llama.cpp say that there is none.
    asked += _of_grammar("grammar", body.grammar or None)
    if len(asked) > 1:
        first, second = asked[0].field, asked[1].field
        message = f"'{first}' and '{second}' both say what the answer must look like. Give one of them."
        raise invalid_value(second, message)
    return asked[0] if asked else None


def constrained(sampling: Sampling, output: StructuredOutput | None) -> Sampling:
    """Return the sampling that obeys a structured output."""
    return sampling if output is None else msgspec.structs.replace(sampling, grammar=output.grammar)


def schema_output(field: str, schema: Raw, *, strict: bool) -> StructuredOutput:
    """Return the output that a JSON schema in a field asks for: an object, a boolean, or a string with its text."""
    source = bytes(schema)
    if source.startswith(b'"'):
        source = require_text(field, msgspec.json.decode(source, type=str)).strip().encode()
    if not (source.startswith(b"{") or source in (b"true", b"false")):
        raise invalid_value(field, f"'{field}' must be a JSON schema: an object.")
    if len(source) > MAX_CHARACTERS:
        raise invalid_value(field, f"'{field}' is {len(source)} bytes long; at most {MAX_CHARACTERS} are allowed.")
    return StructuredOutput(field, Grammar(kind="json_schema", source=source.decode(), strict=strict))


def _of_response_format(body: ResponseFormatBody | None) -> Iterator[StructuredOutput]:
    if body is None:
        return
    name = "response_format"
    _check_format(body, name)
    if body.type == "json" and given(body.value) is None:
        raise missing_parameter(f"{name}.value")
    if body.type in ("json_object", "json"):
        asked = [*_of_schema(f"{name}.schema", body.schema), *_of_schema(f"{name}.value", body.value)]
        yield from asked or [StructuredOutput(name, Grammar(kind="json_schema", source=_ANY_OBJECT))]
    if body.type == "json_schema":
        if body.json_schema is None:
            raise missing_parameter(f"{name}.json_schema")
        field, schema = f"{name}.json_schema.schema", given(body.json_schema.schema)
        if schema is None:
            raise missing_parameter(field)
        yield schema_output(field, schema, strict=bool(body.json_schema.strict))


def _check_format(body: ResponseFormatBody, name: str) -> None:
    if body.type == "structural_tag":
        raise unsupported_parameter(f"{name}.type", f"'{name}.type': 'structural_tag' is not supported. Use 'tools'.")
    if body.type not in _FORMATS:
        raise invalid_value(f"{name}.type", f"'{name}.type' must be one of {', '.join(_FORMATS)}.")
    given_fields = {"json_schema": body.json_schema, "schema": given(body.schema), "value": given(body.value)}
    for field, stated in given_fields.items():
        if stated is not None and field not in _FORMATS[body.type]:
            problem = f"'{name}.{field}' does not belong to the type '{body.type}'."
            where = f" Put the schema into '{name}.json_schema.schema'." if body.type == "json_schema" else ""
            raise invalid_value(f"{name}.{field}", problem + where)


def _of_structured_outputs(body: StructuredOutputsBody | None) -> Iterator[StructuredOutput]:
    if body is None:
        return
    name = "structured_outputs"
    yield from _of_schema(f"{name}.json", body.json)
    yield from _of_texts(f"{name}.regex", body.regex, f"{name}.choice", body.choice)
    yield from _of_grammar(f"{name}.grammar", body.grammar)
    if body.json_object:
        yield StructuredOutput(f"{name}.json_object", Grammar(kind="json_schema", source=_ANY_OBJECT))


def _of_schema(field: str, schema: Raw | UnsetType) -> Iterator[StructuredOutput]:
    source = given(schema)
    if source is not None:
        yield schema_output(field, source, strict=False)


def _of_texts(
    regex_field: str, regex: str | None, choice_field: str, choice: list[str] | None
) -> Iterator[StructuredOutput]:
    if regex is not None:
        yield StructuredOutput(regex_field, Grammar(kind="regex", source=require_text(regex_field, regex)))
    if choice is not None:
        alternatives = "|".join(require_text(choice_field, each).translate(_ESCAPED) for each in choice)
        yield StructuredOutput(choice_field, Grammar(kind="regex", source=f"(?:{alternatives})"))


def _of_grammar(field: str, grammar: str | None) -> Iterator[StructuredOutput]:
    if grammar is not None:
        kind = "lark" if looks_like_lark(require_text(field, grammar)) else "gbnf"
        yield StructuredOutput(field, Grammar(kind=kind, source=grammar))  # type: ignore[arg-type]
