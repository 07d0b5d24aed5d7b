"""Families that write arguments as literals: as in Python (Llama, LFM), or as objects with bare keys (Gemma)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.formats.call_reading import CallReading
from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.json_reading import escaped
from shared.formats.lark_text import LarkText
from shared.formats.parts.fixed import Name
from shared.formats.schema import ALL_TYPES, ArgumentsSchema, as_json
from shared.formats.strict_arguments import json_value, raw_string, strict_schema
from shared.formats.text_source import Markers, Reading, TextSource, markers
from shared.formats.tools import Tool

_OTHER_TYPES = ALL_TYPES - {"string"}
_ENDS = {"(": ")", "{": "}"}
_CLOSERS = ("}", "]", ")")
_IN_QUOTES = {quote: markers(quote, "\\") for quote in ('"', "'", '"""', "'''")}
_BEHIND_WORD = markers(",", "=", ":", *_CLOSERS)
_BEHIND_VALUE = markers(",", *_CLOSERS)
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX = re.compile(r"[0-9a-fA-F]+\Z")


@dataclass(frozen=True, slots=True)
class LiteralArguments:
    """The arguments as literals.

    Attributes:
        opening: The bracket before them.
        assignment: What stands between a key and its value.
        raw_quote: What stands on both sides of a string whose text is not escaped; "" where strings are as in Python.
        true: How the family's models write true; false likewise.
    """

    opening: str
    assignment: str
    raw_quote: str = ""
    true: str = "true"
    false: str = "false"

    def read(self, call: CallReading) -> Reading[bool]:
        """Read the arguments with the brackets around them."""
        if not (yield from call.source.accept(self.opening)):
            return False
        return (yield from _LiteralReading(call, self).read())

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return the arguments that the schema names, in their order, if the tool is strict; else any."""
        members = self._strict_members(lark, tool) if tool.strict and tool.parameters else self._any_members(lark)
        return f"{lark.literal(self.opening)} {members} {lark.literal(_ENDS[self.opening])}"

    def _strict_members(self, lark: LarkText, tool: Tool) -> str:
        schema = strict_schema(tool)
        names = list(schema.properties)
        # One rule for what may follow when something stands before it, so that commas are only between members.
        first = later = '""'
        for name in reversed(names):
            member = lark.rule(
                "member", f"{lark.literal(name + self.assignment)} ( {self._values(lark, schema, name)} )"
            )
            is_required = name in schema.required
            with_it = lark.rule("members", f"{member} {later}")
            after = lark.rule("later", f"/, ?/ {member} {later}" + ("" if is_required else f" | {later}"))
            first = with_it if is_required else lark.rule("first", f"{with_it} | {first}")
            later = after
        return first

    def _values(self, lark: LarkText, schema: ArgumentsSchema, name: str) -> str:
        types = schema.types(name)
        values = []
        others = types - {"boolean"}
        if self.raw_quote and "string" in types:
            quote = lark.literal(self.raw_quote)
            values.append(f"{quote} {raw_string(lark, schema, schema.properties[name], self.raw_quote)}")
            others -= {"string"}
        if "boolean" in types:
            values += map(lark.literal, self._booleans(schema.choices(name)))
        if others:
            values.append(json_value(lark, schema, name, others))
        return " | ".join(values)

    def _booleans(self, choices: list[object] | None) -> list[str]:
        allowed = [True, False] if choices is None else [each for each in choices if isinstance(each, bool)]
        return [self.true if each else self.false for each in allowed]

    def _any_members(self, lark: LarkText) -> str:
        key = lark.terminal("KEY", r"/[A-Za-z_][A-Za-z0-9_]{0,63}/")
        values = [lark.of_types(_OTHER_TYPES - {"boolean"} if self.raw_quote else ALL_TYPES - {"boolean"})]
        values += map(lark.literal, (self.true, self.false))
        if self.raw_quote:
            quote = lark.literal(self.raw_quote)
            values.append(f"{quote} {lark.through(self.raw_quote)}")
        member = lark.rule("member", f"{key} {lark.literal(self.assignment)} ( {' | '.join(values)} )")
        return f"( {member} ( /, ?/ {member} )* )?"


@dataclass(slots=True)
class _LiteralReading:
    """Reads literals and tells them as JSON. Owns the open brackets: for each its end, and whether it is empty."""

    call: CallReading
    syntax: LiteralArguments
    ends: list[str] = field(default_factory=lambda: ["}"])
    is_empty: list[bool] = field(default_factory=lambda: [True])

    def read(self) -> Reading[bool]:
        source = self.call.source
        while self.ends:
            yield from source.skip_space()
            character = yield from source.peek()
            if not character or (yield from source.next_of(self.call.closes)):
                return False
            if character in _CLOSERS:
                source.take(source.at + 1)
                self.is_empty.pop()
                self.tell(self.ends.pop())
            elif character == ",":
                source.take(source.at + 1)
            elif not (yield from self._read_item()):
                return False
        return True

    def _read_item(self) -> Reading[bool]:
        """Read a member of an object or an element of an array, up to its opening bracket if it has one."""
        separator = "" if self.is_empty[-1] else ", "
        self.is_empty[-1] = False
        if self.ends[-1] == "}":
            key = yield from self._read_key()
            if key is None:
                return False
            separator += f"{key}: "
        self.tell(separator)
        source = self.call.source
        yield from source.skip_space()
        character = yield from source.peek()
        if character in ("{", "[", "("):
            source.take(source.at + 1)
            self.ends.append("}" if character == "{" else "]")
            self.is_empty.append(True)
            self.tell("{" if character == "{" else "[")
            return True
        is_whole = yield from self._read_quoted(self.tell)
        if is_whole is not None:
            return is_whole
        word, found = yield from self._read_word(markers(*_BEHIND_VALUE.texts, *self.call.closes.texts))
        if word:
            self.tell(as_json(word, _OTHER_TYPES))
        return bool(word and found)

    def _read_key(self) -> Reading[str | None]:
        """Read a key and what stands behind it; return the key as JSON, None if there is none."""
        source = self.call.source
        parts: list[str] = []
        is_whole = yield from self._read_quoted(parts.append)
        if is_whole is None:
            word, _ = yield from self._read_word(_BEHIND_WORD)
            parts.append(f'"{escaped(word)}"')
            is_whole = bool(word)
        yield from source.skip_space()
        return "".join(parts) if is_whole and (yield from source.accept("=", ":")) else None

    def _read_word(self, behind: Markers) -> Reading[tuple[str, str]]:
        parts: list[str] = []
        while True:
            text, found = yield from self.call.source.until(behind)
            parts.append(text)
            if found or self.call.source.has_ended:
                return "".join(parts).strip(), found

    def _read_quoted(self, tell: Callable[[str], None]) -> Reading[bool | None]:
        """Read a string; return True if it was complete, None if none comes next."""
        source = self.call.source
        raw = self.syntax.raw_quote
        quote = yield from source.accept(*_IN_QUOTES, raw)
        if not quote:
            return None
        tell('"')
        while True:
            text, found = yield from source.until(markers(raw) if quote == raw else _IN_QUOTES[quote])
            tell(escaped(text))
            if found == "\\":
                source.take(source.at + 1)
                tell((yield from _read_escape(source)))
            elif found:
                yield from source.accept(found)
                tell('"')
                return True
            elif source.has_ended:
                return False

    def tell(self, text: str) -> None:
        if not self.call.has_started:
            self.call.start()
            self.call.arguments("{")
        self.call.arguments(text)


def _read_escape(source: TextSource) -> Reading[str]:
    """Read what stands behind a backslash in Python or JSON, and return it for a JSON string."""
    kind = yield from source.peek()
    source.take(source.at + len(kind))
    if kind not in _HEX_LENGTHS:
        # A backslash before anything else stands for itself in Python.
        return escaped(_ESCAPES.get(kind, kind if kind in ("\\", "'", '"', "/") else f"\\{kind}"))
    length = _HEX_LENGTHS[kind]
    while len(source.text) - source.at < length and not source.has_ended:
        yield
    digits = source.text[source.at : source.at + length]
    if not _HEX.match(digits) or len(digits) < length or int(digits, 16) > 0x10FFFF:
        return escaped(f"\\{kind}")
    source.take(source.at + length)
    value = int(digits, 16)
    # Halves of a surrogate pair stay escapes: the next one may be the other half.
    return f"\\u{value:04x}" if kind == "u" or 0xD800 <= value <= 0xDFFF else escaped(chr(value))


_PYTHONIC = (Name(), LiteralArguments(opening="(", assignment="=", true="True", false="False"))

# Llama 3 and 4 with templates that ask for it: a list of calls as in Python.
LLAMA_PYTHONIC = ChatFormat(
    name="llama-pythonic",
    marks=(("func_name1(params_name1=",),),
    calls=(
        CallForm(
            opens=("<|python_start|>", "<|python_tag|>"),
            begin="[",
            bare_opens=("",),
            bare_pattern=r"\s*\[\s*[A-Za-z_][A-Za-z0-9_.]*\(",
            parts=_PYTHONIC,
            separator=", ",
            closes=("]", "]<|python_end|>"),
        ),
    ),
    dropped=("<|eom_id|>", "<|eot_id|>"),
    tokens=("<|python_start|>", "<|python_tag|>", "<|python_end|>"),
    keeps_special_tokens=True,
)

# LFM 2: such a list between special tokens.
LFM = ChatFormat(
    name="lfm",
    marks=(("<|tool_call_start|>",),),
    calls=(
        CallForm(
            opens=("<|tool_call_start|>",),
            begin="[",
            parts=_PYTHONIC,
            separator=", ",
            closes=("]<|tool_call_end|>", "]"),
        ),
    ),
    tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    keeps_special_tokens=True,
)

# Gemma: since Gemma 4, and in FunctionGemma, an object with bare keys and its own quotation marks.
GEMMA = ChatFormat(
    name="gemma",
    marks=(("<|tool_call>",),),
    reasoning=ThinkTags(opens=("<|channel>thought\n", "<|channel>thought"), closes=("<channel|>",)),
    calls=(
        CallForm(
            opens=("<|tool_call>",),
            begin="call:",
            parts=(Name(), LiteralArguments(opening="{", assignment=":", raw_quote='<|"|>')),
            closes=("<tool_call|>",),
        ),
    ),
    dropped=("<turn|>", "<|tool_response>"),
    tokens=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    keeps_special_tokens=True,
)

FUNCTION_GEMMA = ChatFormat(
    name="function-gemma",
    marks=(("<start_function_call>",),),
    calls=(
        CallForm(
            opens=("<start_function_call>",),
            begin="call:",
            parts=(Name(), LiteralArguments(opening="{", assignment=":", raw_quote="<escape>")),
            closes=("<end_function_call>",),
        ),
    ),
    dropped=("<end_of_turn>", "<start_function_response>"),
    tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
    keeps_special_tokens=True,
)
