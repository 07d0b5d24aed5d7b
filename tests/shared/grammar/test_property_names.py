"""`propertyNames` as properties; that the same objects are let through, the corpus shows."""

from __future__ import annotations

import json
from typing import Any

from shared.grammar.property_names import with_named_properties


def test_schema_of_the_client_stays_as_it_is() -> None:
    schema = {"type": "object", "propertyNames": {"enum": ["a"]}}
    written = with_named_properties(schema)
    assert schema == {"type": "object", "propertyNames": {"enum": ["a"]}}
    assert written == {"type": "object", "properties": {"a": True}, "additionalProperties": False}


def test_schema_without_it_is_returned_itself() -> None:
    schema = {"type": "object", "properties": {"propertyNames": {"const": 1}}}
    assert with_named_properties(schema) is schema


def test_records_of_records_are_written_as_long_as_they_stay_small() -> None:
    """Each record repeats the one within it: ten names five deep would be a hundred thousand."""
    names = {"enum": [f"name {index}" for index in range(10)]}
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(12):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    written = json.dumps(with_named_properties(schema))
    assert len(written) < 1 << 18
    assert "propertyNames" in written


def test_many_records_are_written_as_long_as_all_stay_small() -> None:
    record = {"type": "object", "propertyNames": {"enum": [f"name {index}" for index in range(100)]}}
    schema = {"type": "object", "properties": {f"p{index}": record for index in range(500)}}
    assert len(json.dumps(with_named_properties(schema))) < 1 << 20


def test_more_names_than_properties_are_allowed_are_not_written() -> None:
    schema = {"type": "object", "propertyNames": {"enum": [f"{index}" for index in range(1_001)]}}
    assert with_named_properties(schema) == schema
