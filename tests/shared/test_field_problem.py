from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, Struct

from shared.field_problem import field_problem


class _Inner(Struct, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1, le=9)]
    weights: dict[int, float] = {}


class _Outer(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=3)] | None = None
    inner: list[_Inner] = []


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"name": "long"}, "'name' is invalid: expected string of length <= 3"),
        ({"name": 3}, "'name' is invalid: expected string or null, got integer"),
        ({"inner": [{"count": 10}]}, "'inner.[0].count' is invalid: expected integer <= 9"),
        ({"inner": [{"count": 1, "weights": {"a": 1}}]}, "A key of 'inner.[0].weights' is invalid: expected integer"),
        ({"inner": [{}]}, "'inner.[0].count' is missing"),
        ({"inner": [{"count": 1, "cuont": 2}]}, "'inner.[0].cuont' is not a field of the thing"),
        ({"nmae": "x"}, "'nmae' is not a field of the thing"),
        ([], "the thing is invalid: expected object, got array"),
    ],
)
def test_problem_is_told_in_words_of_json_with_field_and_limit(value: Any, sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.json.decode(msgspec.json.encode(value), type=_Outer)
    assert field_problem(raised.value).sentence("the thing").startswith(sentence)
