"""Reads a text in pieces, and returns what a client would see."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from shared.formats import (
    ChatFormat,
    ContentText,
    OutputEvent,
    ReasoningText,
    Tool,
    ToolCallArguments,
    ToolCallStart,
)
from shared.formats.output_reader import FormatReader


@dataclass(frozen=True)
class Understood:
    """What an answer says, as a client puts its events together."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


def joined(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Return events with neighbours of one kind joined."""
    whole: list[OutputEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        match last, event:
            case (ContentText(a), ContentText(b)):
                whole[-1] = ContentText(a + b)
            case (ReasoningText(a), ReasoningText(b)):
                whole[-1] = ReasoningText(a + b)
            case (ToolCallArguments(i, a), ToolCallArguments(j, b)) if i == j:
                whole[-1] = ToolCallArguments(i, a + b)
            case _:
                whole.append(event)
    return whole


def read(
    spoken: ChatFormat,
    pieces: Iterable[str],
    tools: list[Tool],
    *,
    starts_in_reasoning: bool = False,
    is_exclusive: bool = False,
) -> list[OutputEvent]:
    reader = spoken.reader(tools, starts_in_reasoning=starts_in_reasoning, is_exclusive=is_exclusive)
    events = list(itertools.chain.from_iterable(map(reader.feed, pieces)))
    events += reader.finish()
    if isinstance(reader, FormatReader):
        assert reader._source._record is None, "what is read is kept for ever"
    assert not any(isinstance(event, ContentText | ReasoningText) and not event.text for event in events)
    return joined(events)


def understood(events: list[OutputEvent]) -> Understood:
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(names)
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(names) - 1
            arguments[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    return Understood(content, reasoning, tuple(zip(names, arguments, strict=True)))
