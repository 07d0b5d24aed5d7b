"""Blocks of a message whose text the model has written."""

from __future__ import annotations

import pytest

from gateway.anthropic.blocks import BlockList


@pytest.mark.parametrize("arguments", ['{"a":' * 5000 + "1" + "}" * 5000, "[" * 5000, '{"a": 1', ""])
def test_call_whose_arguments_cannot_be_read_has_an_empty_input(arguments: str) -> None:
    blocks = BlockList()
    blocks.call("f")
    blocks.arguments(arguments)
    assert [block["input"] for block in blocks.blocks()] == [{}]
