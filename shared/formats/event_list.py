"""Collects the events of one piece of text, so that what belongs together is one event."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shared.formats.events import (
    ContentText,
    OutputEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)


class EventList:
    """Owns the events that were not taken yet, and the number of calls."""

    def __init__(self) -> None:
        """Begin without events."""
        self._events: list[OutputEvent] = []
        self._texts: list[str] = []
        self._event_of: Callable[[str], OutputEvent] = ContentText
        self._num_calls = 0

    def content(self, text: str) -> None:
        """Add text of the answer."""
        self._add(ContentText, text)

    def reasoning(self, text: str) -> None:
        """Add text of what the model thinks."""
        self._add(ReasoningText, text)

    def start_call(self, name: str) -> Callable[[str], None]:
        """Begin a call, and return what adds to its arguments."""
        self._flush()
        index = self._num_calls
        self._num_calls += 1
        self._events.append(ToolCallStart(index, name))
        return partial(self._add, partial(ToolCallArguments, index))

    def take(self) -> list[OutputEvent]:
        """Return the events, and forget them."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _add(self, event_of: Callable[[str], OutputEvent], text: str) -> None:
        if not text:
            return
        if event_of is not self._event_of:
            self._flush()
            self._event_of = event_of
        self._texts.append(text)

    def _flush(self) -> None:
        if self._texts:
            self._events.append(self._event_of("".join(self._texts)))
            self._texts = []
