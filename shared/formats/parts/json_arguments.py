"""Arguments that are JSON, alone or in an object that says the name too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.formats.call_reading import CallReading
from shared.formats.json_reading import escaped, parsed, read_string, read_value, with_halves_escaped
from shared.formats.lark_text import LarkText
from shared.formats.schema import moved
from shared.formats.text_source import Reading
from shared.formats.tools import Tool

_MAX_KEY_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The arguments as a JSON object."""

    def read(self, call: CallReading) -> Reading[bool]:
        """Read the object."""
        yield from call.source.skip_space()
        if (yield from call.source.peek()) != "{":
            return False
        call.start()
        return (yield from read_value(call.source, call.arguments, call.closes))

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return a JSON object that keeps to the schema, if the tool is strict."""
        return lark.arguments(tool)


@dataclass(frozen=True, slots=True)
class CallObject:
    """A JSON object with the name and the arguments, for which both usual names are read; models write this one."""

    arguments_key: str = "arguments"

    def read(self, call: CallReading) -> Reading[bool]:
        """Read the object; its members may stand in any order."""
        if not (yield from call.source.accept("{")):
            return False
        early: list[str] = []
        while True:
            yield from call.source.skip_space()
            key = yield from read_string(call.source, _MAX_KEY_CHARACTERS)
            if key is None or not (yield from call.source.accept_spaced(" : ")):
                return False
            if not (yield from self._read_member(call, key, early)):
                return False
            yield from call.source.skip_space()
            if not (yield from call.source.accept(",")):
                break
        if not (yield from call.source.accept("}")) or call.tool is None:
            return False
        if not call.has_started:
            return _tell_at_once(call, "".join(early).strip())
        return True

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return the object as the models write it."""
        head = f'{{"name": "{escaped(tool.name)}", "{escaped(self.arguments_key)}": '
        return f"{lark.literal(head)} {lark.arguments(tool)} {lark.literal('}')}"

    def schema(self, tool: Tool, place: str) -> dict[str, Any]:
        """Return the schema of the object, which stands at `place` in a larger one."""
        arguments = {"type": "object"}
        if tool.strict and tool.parameters:
            arguments = moved(parsed(tool.parameters), f"{place}/properties/{self.arguments_key}")
        members = {"name": {"const": tool.name}, self.arguments_key: arguments}
        return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}

    def _read_member(self, call: CallReading, key: str, early: list[str]) -> Reading[bool]:
        if key == "name" and call.tool is None:
            name = yield from read_string(call.source, call.tools.longest_name)
            call.tool = None if name is None else call.tools.named(name)
            return call.tool is not None
        if key in ("arguments", "parameters") and not call.has_started and not early:
            if call.tool is not None and (yield from call.source.peek()) == "{":
                call.start()
                return (yield from read_value(call.source, call.arguments, call.closes))
            return (yield from read_value(call.source, early.append, call.closes))
        if key not in ("id", "type", "index") and not call.has_started:
            return False
        return (yield from read_value(call.source, _ignore, call.closes))


def _tell_at_once(call: CallReading, arguments: str) -> bool:
    """Tell a call whose arguments stood before its name, were written as a string, or are absent.

    An object with a name alone is a call only if the tool was offered: it may as well be an answer.
    """
    assert call.tool is not None
    if not arguments and not call.tools.is_offered(call.tool):
        return False
    if arguments.startswith('"'):
        try:
            arguments = with_halves_escaped(str(parsed(arguments)).strip())
        except ValueError:
            return False
    if arguments in ("", "null"):
        arguments = "{}"
    if not arguments.startswith("{"):
        return False
    call.start()
    call.arguments(arguments)
    return True


def _ignore(text: str) -> None:
    """Drop what says nothing of the call."""
