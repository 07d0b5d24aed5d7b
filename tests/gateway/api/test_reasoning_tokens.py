"""Which tokens of a choice count as reasoning, by what a reader made of each step's text."""

from __future__ import annotations

import pytest

from gateway.api.read_choice import ReasoningTokens
from shared.formats.events import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart

R, C = ReasoningText("rrrr"), ContentText("cccc")
CALL, ARGUMENTS = ToolCallStart(0, "nn"), ToolCallArguments(0, "aaaa")


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        # Each step: its tokens, and what was read in it.
        ([(3, [C])], 0),
        ([(3, [R])], 3),
        ([(3, [R]), (2, [R]), (4, [C]), (1, [C])], 5),
        # Marks: the opening one, and the closing one behind reasoning.
        ([(1, []), (2, [R])], 3),
        ([(2, [R]), (1, []), (3, [C])], 3),
        ([(2, [R]), (1, []), (1, []), (3, [R])], 7),
        ([(1, []), (2, [C])], 0),
        # Those before a call are the call's.
        ([(2, [R]), (4, []), (1, [CALL])], 2),
        ([(2, [R]), (4, []), (1, [ARGUMENTS])], 6),
        # A step of several is shared out by length.
        ([(4, [R, C])], 2),
        ([(4, [ReasoningText("r"), ContentText("ccc")])], 1),
        ([(3, [R, ToolCallStart(0, "nnnn")])], 2),
        ([(4, [C, R])], 2),
        ([(4, [C, R]), (1, []), (1, [C])], 3),
        ([(4, [R, C]), (1, []), (1, [C])], 2),
        ([(2, [R]), (1, []), (4, [R, C])], 5),
        # What is left at the end.
        ([(2, [R]), (3, [])], 5),
        ([(2, [C]), (3, [])], 0),
        ([(2, [R]), (1, [C]), (3, [])], 2),
        ([(3, [])], 0),
        ([], 0),
    ],
)
def test_tokens_are_counted(steps: list[tuple[int, list[OutputEvent]]], count: int) -> None:
    tokens = ReasoningTokens()
    for num_tokens, events in steps:
        tokens.note(num_tokens, events)
    tokens.end()
    assert tokens.count == count
    tokens.end()
    assert tokens.count == count
