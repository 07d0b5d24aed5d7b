"""`uniqueItems` as an enumeration, and its refusal; that the same lists are let through, the corpus shows."""

from __future__ import annotations

from typing import Any

import pytest

from shared.grammar import GrammarError
from shared.grammar.unique_items import MAX_LISTS, with_unique_items


def unique(items: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **fields}


def test_schema_of_the_client_stays_as_it_is() -> None:
    schema = unique({"enum": ["a", "b", "a"]}, title="A")
    assert with_unique_items(schema) == {"title": "A", "enum": [[], ["a"], ["b"], ["a", "b"], ["b", "a"]]}
    assert schema == unique({"enum": ["a", "b", "a"]}, title="A")
    plain = {"properties": {"uniqueItems": {"type": "integer"}}}
    assert with_unique_items(plain) is plain


@pytest.mark.parametrize(("num_values", "most", "num_lists"), [(4, None, 65), (9, 2, 82), (99, 1, None)])
def test_few_lists_are_written(num_values: int, most: int | None, num_lists: int | None) -> None:
    fields = {} if most is None else {"maxItems": most}
    written = with_unique_items(unique({"enum": list(range(num_values))}, **fields))
    assert "uniqueItems" not in written
    assert (len(written["enum"]) if "enum" in written else None) == num_lists
    assert num_lists is None or num_lists <= MAX_LISTS


@pytest.mark.parametrize(
    "schema",
    [
        unique({"type": "string"}),
        unique({"enum": [1, 1.0]}),
        unique({"enum": ["a", "b"], "type": "integer"}),
        unique({"enum": list(range(5))}),
        unique({"enum": list(range(10))}, maxItems=2),
        unique({"enum": ["x" * 20_000, "y" * 20_000]}),
        unique({"enum": [1, 2]}, contains={"const": 1}),
        unique({"enum": [1, 2]}) | {"type": ["array", "null"]},
        unique({"$ref": "#/$defs/none"}),
        unique({"enum": [1, 2]}) | {"uniqueItems": "yes"},
    ],
)
def test_other_lists_are_refused_with_their_place_and_what_to_do(schema: Any) -> None:
    fine = unique({"type": "boolean"})
    with pytest.raises(GrammarError) as refused:
        with_unique_items({"properties": {"a": fine, "b": schema}})
    assert refused.value.path == ".properties.b"
    assert "Leave it out, and check afterwards" in refused.value.reason
