"""The events of a model's answer: content, reasoning and tool calls, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from msgspec import Struct


class ContentText(Struct, frozen=True, gc=False):
    """More of the answer itself."""

    text: str


class ReasoningText(Struct, frozen=True, gc=False):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallStart(Struct, frozen=True, gc=False):
    """A call of a tool begins. `index` counts the calls of the answer from 0."""

    index: int
    name: str


class ToolCallArguments(Struct, frozen=True, gc=False):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


OutputEvent = ContentText | ReasoningText | ToolCallStart | ToolCallArguments


class OutputReader(Protocol):
    """Reads the text of one answer. However the text is cut into pieces, the events say the same."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Return the events that became certain with this text."""

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """Return the last events when the text ends, even in the middle of a call.

        With `is_cut` a limit has ended the text: markup that could still have become a call is left out.
        """


class PlainReader:
    """Reads an answer in which all text is content."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Return the text as content."""
        return [ContentText(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """Return nothing: nothing was held back."""
        return []


class EventList:
    """Owns the events that were not taken yet, and the number of calls."""

    def __init__(self) -> None:
        self._events: list[OutputEvent] = []
        self._texts: list[str] = []
        self._event_of: Callable[[str], OutputEvent] = ContentText
        self._num_calls = 0

    def add(self, event_of: Callable[[str], OutputEvent], text: str) -> None:
        """Add text of a kind."""
        if not text:
            return
        if event_of is not self._event_of:
            self._flush()
            self._event_of = event_of
        self._texts.append(text)

    def start_call(self, name: str) -> Callable[[str], None]:
        """Begin a call, and return what adds to its arguments."""
        self._flush()
        index = self._num_calls
        self._num_calls += 1
        self._events.append(ToolCallStart(index, name))
        return partial(self.add, partial(ToolCallArguments, index))

    def take(self) -> list[OutputEvent]:
        """Return the events, and forget them."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if self._texts:
            self._events.append(self._event_of("".join(self._texts)))
            self._texts = []
