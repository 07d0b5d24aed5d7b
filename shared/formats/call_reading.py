"""One call of a tool while it is read, and which names are those of tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property

from shared.formats.events import EventList
from shared.formats.schema import ArgumentsSchema
from shared.formats.text_source import Markers, TextSource
from shared.formats.tools import Tool

MAX_NAME_CHARACTERS = 64
"""Of a name that was not offered: as many as a tool's name may have."""

_RUN = re.compile(r"[A-Za-z0-9_.-]*")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?")


class CallableTools:
    """The tools of one answer, by name. Holds no parsing state.

    A model sometimes calls a tool that was not offered. An agent answers such a call with "no such tool", and the model
    goes on; as text, the markup would end the agent's turn and stay in the conversation.

    Attributes:
        offered: Those that were offered.
        longest_name: Characters of the longest name that is understood.
    """

    def __init__(self, tools: Sequence[Tool], *, is_exclusive: bool) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.offered = tools
        self._is_exclusive = is_exclusive
        longest = max(map(len, self._tools), default=0)
        self.longest_name = longest if is_exclusive else max(longest, MAX_NAME_CHARACTERS)

    def is_offered(self, tool: Tool) -> bool:
        """Return True if a tool is one of those that were offered."""
        return tool.name in self._tools

    def named(self, name: str) -> Tool | None:
        """Return the tool with a name; None for a text that is not a name of a tool."""
        tool = self._tools.get(name)
        if tool is not None or self._is_exclusive or len(name) > MAX_NAME_CHARACTERS:
            return tool
        return Tool(name) if _NAME.fullmatch(name) else None

    def may_go_on(self, text: str) -> bool:
        """Return True if more text may change which tool a text begins with."""
        if any(name.startswith(text) for name in self._tools):
            return True
        return not self._is_exclusive and len(text) <= MAX_NAME_CHARACTERS and bool(_RUN.fullmatch(text))

    def at_beginning(self, text: str) -> Tool | None:
        """Return the tool whose name a text begins with; None if there is none, or the name goes on otherwise.

        The name of a tool that was not offered is known by what stands behind it, so that the end of a text ends none.
        """
        name = max((each for each in self._tools if text.startswith(each)), key=len, default="")
        if name and not _continues(text[len(name) : len(name) + 1]):
            return self._tools[name]
        run = _RUN.match(text)
        assert run is not None
        behind = text[run.end() : run.end() + 1]
        return self.named(run.group()) if behind and not _continues(behind) else None


def _continues(character: str) -> bool:
    """Return True if a character behind a name would be a part of it."""
    return character.isalnum() or (character != "" and character in "_-.")


class CallReading:
    """Owns the state of the call so far.

    Attributes:
        source: Where the text comes from.
        tools: Those that may be called.
        closes: Markers that end the call, even an incomplete one.
        tool: The one that is called, once its name is known.
        has_started: The call's start was emitted, so that later arguments belong to it.
    """

    def __init__(self, source: TextSource, tools: CallableTools, closes: Markers, events: EventList) -> None:
        self.source = source
        self.tools = tools
        self.closes = closes
        self.tool: Tool | None = None
        self._events = events
        self._add: Callable[[str], None] | None = None

    @cached_property
    def schema(self) -> ArgumentsSchema:
        """The schema of the arguments; the tool must be known."""
        assert self.tool is not None
        return ArgumentsSchema(self.tool.parameters)

    @property
    def has_started(self) -> bool:
        """Whether the call's start was emitted."""
        return self._add is not None

    def start(self) -> None:
        """Emit the call's start; the tool must be known."""
        assert self.tool is not None
        self._add = self._events.start_call(self.tool.name)

    def arguments(self, text: str) -> None:
        """Emit more of the JSON text of the arguments; the call must have started."""
        assert self._add is not None
        self._add(text)
