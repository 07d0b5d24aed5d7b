"""What a reader makes of a model's text: content, reasoning and tool calls, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a tool begins. `index` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


OutputEvent = ContentText | ReasoningText | ToolCallStart | ToolCallArguments


class OutputReader(Protocol):
    """Reads the text of one answer. However the text is cut into pieces, the events say the same."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Return what became certain with this text."""

    def finish(self) -> list[OutputEvent]:
        """Return what is left when the text ends, even in the middle of a call."""


class PlainReader:
    """Reads an answer in which all text is content."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Return the text as content."""
        return [ContentText(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        """Return nothing: nothing was held back."""
        return []
