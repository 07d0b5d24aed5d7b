"""One call of a tool while it is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from shared.formats.callable_tools import CallableTools
from shared.formats.event_list import EventList
from shared.formats.markers import Markers
from shared.formats.schema import ArgumentsSchema
from shared.formats.text_source import TextSource
from shared.formats.tools import Tool


class CallReading:
    """Owns what is known of the call so far.

    Attributes:
        source: Where the text comes from.
        tools: Those that may be called.
        closes: What ends the call, whatever is missing in it.
        tool: The one that is called, once its name is known.
        has_started: The call was told, so that what follows belongs to it.
    """

    def __init__(self, source: TextSource, tools: CallableTools, closes: Markers, events: EventList) -> None:
        """Read a call whose beginning comes next in the source."""
        self.source = source
        self.tools = tools
        self.closes = closes
        self.tool: Tool | None = None
        self._events = events
        self._add: Callable[[str], None] | None = None

    @cached_property
    def schema(self) -> ArgumentsSchema:
        """What is said of the arguments; the tool is known."""
        assert self.tool is not None
        return ArgumentsSchema(self.tool.parameters)

    @property
    def has_started(self) -> bool:
        """Whether the call was told."""
        return self._add is not None

    def start(self) -> None:
        """Tell the call; the tool is known."""
        assert self.tool is not None
        self._add = self._events.start_call(self.tool.name)

    def arguments(self, text: str) -> None:
        """Tell more of the JSON text of the arguments; the call has started."""
        assert self._add is not None
        self._add(text)
