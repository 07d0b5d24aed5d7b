"""Which names are those of tools that were not offered."""

from __future__ import annotations

from shared.formats.call_reading import MAX_NAME_CHARACTERS, CallableTools
from shared.formats.tools import Tool


def test_name_that_was_not_offered_is_no_longer_than_a_tool_s_may_be_however_long_those_offered_are() -> None:
    tools = CallableTools([Tool("x" * (MAX_NAME_CHARACTERS + 10))], is_exclusive=False)
    longest = "y" * MAX_NAME_CHARACTERS
    assert tools.named(longest) == Tool(longest)
    assert tools.named(longest + "y") is None
    assert CallableTools([Tool("x")], is_exclusive=True).named(longest) is None
