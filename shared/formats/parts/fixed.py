"""Parts that are not the arguments: fixed texts, the tool's name, and skipped text."""

from __future__ import annotations

from dataclasses import dataclass

from shared.formats.call_reading import CallReading
from shared.formats.lark_text import LarkText
from shared.formats.text_source import Reading, markers
from shared.formats.tools import Tool

_MAX_SKIPPED_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Fixed:
    """A text. White space in it may be other or absent when it is read."""

    text: str

    def read(self, call: CallReading) -> Reading[bool]:
        """Read the text."""
        return (yield from call.source.accept_spaced(self.text))

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return the text."""
        return lark.literal(self.text)


@dataclass(frozen=True, slots=True)
class Name:
    """The name of the tool."""

    def read(self, call: CallReading) -> Reading[bool]:
        """Read the name."""
        source, tools = call.source, call.tools
        while True:
            text = source.text[source.at : source.at + tools.longest_name + 1]
            if source.has_ended or not tools.may_go_on(text):
                break
            yield
        call.tool = tools.at_beginning(text)
        if call.tool is None:
            return False
        source.take(source.at + len(call.tool.name))
        return True

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return the tool's name."""
        return lark.literal(tool.name)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Text that says nothing, up to and with `end`. `usual` is what the family's models write."""

    usual: str
    end: str

    def read(self, call: CallReading) -> Reading[bool]:
        """Skip the text."""
        length = 0
        while length <= _MAX_SKIPPED_CHARACTERS:
            text, found = yield from call.source.until(markers(self.end), _MAX_SKIPPED_CHARACTERS + 1 - length)
            length += len(text)
            if found and length <= _MAX_SKIPPED_CHARACTERS:
                yield from call.source.accept(found)
                return True
            if call.source.has_ended:
                return False
        return False

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return the text that the models write."""
        return lark.literal(self.usual + self.end)


@dataclass(frozen=True, slots=True)
class MaybeSkipped:
    """Text that says nothing and may be absent: `end` alone, or `begin`, any text and `end`, or nothing of it."""

    begin: str
    end: str

    def read(self, call: CallReading) -> Reading[bool]:
        """Skip the text where it is."""
        found = yield from call.source.accept(self.begin, self.end)
        return (yield from Skipped("", self.end).read(call)) if found == self.begin else True

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return the end alone."""
        return lark.literal(self.end)
