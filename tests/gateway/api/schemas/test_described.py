"""Rows of the table of parameters from the fields of a struct."""

from __future__ import annotations

from typing import Annotated

import pytest
from msgspec import Meta, Struct

from gateway.api.schemas.names import Row, described, rows_of
from gateway.api.schemas.unserved_names import OpenAi


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
