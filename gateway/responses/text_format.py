"""`text.format`: what the text of a response must look like."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.api.schemas.names import described
from gateway.api.schemas.refusals import invalid_value, missing_parameter
from gateway.api.schemas.structured_output import schema_output
from gateway.api.schemas.texts import given
from gateway.generation import StructuredOutput
from shared.sampling import Grammar

_FIELD = "text.format"
_TYPES = ("text", "json_object", "json_schema")


class TextFormatBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A format; the name says nothing about the text."""

    type: Annotated[Annotated[str, Meta(max_length=64)], described("`text`, `json_object` or `json_schema`.")]
    name: Annotated[Annotated[str, Meta(max_length=256)] | None, described("Repeated in the response.", "answer")] = (
        None
    )
    description: Annotated[str | None, described("Repeated in the response.", "An answer.")] = None
    schema: Annotated[
        Raw | UnsetType, described("The schema, with `json_schema`.", {"type": "object", "maxProperties": 0})
    ] = UNSET
    strict: Annotated[bool | None, described("Refuse a schema that can be kept to in part only.", True)] = None


def text_output(body: TextFormatBody | None) -> StructuredOutput | None:
    """Return what the text must look like; None for anything.

    Raises:
        ApiError: 400; the format is unknown or not complete.
    """
    if body is None or body.type == "text":
        return None
    if body.type == "json_object":
        return StructuredOutput(_FIELD, Grammar(kind="json_schema", source='{"type":"object"}'))
    if body.type != "json_schema":
        raise invalid_value(f"{_FIELD}.type", f"'{_FIELD}.type' must be one of {', '.join(_TYPES)}.")
    field = f"{_FIELD}.schema"
    schema = given(body.schema)
    if schema is None:
        raise missing_parameter(field)
    return schema_output(field, schema, strict=bool(body.strict))


def repeated_format(body: TextFormatBody | None) -> dict[str, Any]:
    """Return the format as the response repeats it."""
    if body is None or body.type != "json_schema":
        return {"type": "text" if body is None else body.type}
    fields: dict[str, Any] = {"type": body.type, "name": body.name or "", "strict": bool(body.strict)}
    return fields | {"description": body.description, "schema": body.schema}
