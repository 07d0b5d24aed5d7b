"""What is allowed where msgspec says only that a value is not."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec import Struct, field

from gateway.api.schemas.decoding import allowed_values


class Inner(Struct, rename={"kind": "type"}):
    kind: Literal["a", "b"] | None = None
    other: list[Literal["c"]] = field(default_factory=list)


class Outer(Struct):
    inner: Inner | str
    inners: list[Inner]


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ("inner.type", ["a", "b"]),
        ("inners.[12].type", ["a", "b"]),
        ("inners.[0].other.[3]", ["c"]),
        ("inners.[0]", []),
        ("nothing", []),
    ],
)
def test_values_of_a_place_are_those_of_its_type(place: str, allowed: list[str]) -> None:
    assert allowed_values(Outer, place) == allowed
