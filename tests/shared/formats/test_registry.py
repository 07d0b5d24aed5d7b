from __future__ import annotations

import pytest

from shared.formats import ContentText, Tool, ToolChoice, detect_format, format_named, format_names
from shared.grammar import Grammar


@pytest.mark.parametrize("name", ["", "plain", "a family of tomorrow"])
def test_name_without_a_description_reads_all_text_as_content(name: str) -> None:
    reader = format_named(name).reader([Tool("f")])
    assert reader.feed('<tool_call>{"name": "f"}') == [ContentText('<tool_call>{"name": "f"}')]
    assert reader.finish() == []


@pytest.mark.parametrize("name", format_names())
def test_format_is_found_by_its_own_name(name: str) -> None:
    assert format_named(name).name == name


def test_model_without_a_template_speaks_the_plain_format() -> None:
    assert detect_format(None) == "plain"
    assert detect_format("{{ messages }}") == "plain"


def test_plain_format_constrains_the_content_alone() -> None:
    content = Grammar(kind="json_schema", source="{}")
    assert format_named("plain").grammar([], ToolChoice(), content=content) == content
    assert format_named("plain").grammar([], ToolChoice()) is None
