"""Families that write each argument between tags: GLM, Qwen 3 Coder, MiniMax and DeepSeek V3.2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shared.formats.call_reading import CallReading
from shared.formats.chat_format import ChatFormat
from shared.formats.description import THINK_TOKENS, CallForm, ThinkTags
from shared.formats.json_reading import escaped, read_value
from shared.formats.lark_text import LarkText
from shared.formats.parts.fixed import Fixed, Name
from shared.formats.schema import ALL_TYPES, ArgumentsSchema, as_json
from shared.formats.strict_arguments import json_value, raw_string, strict_schema
from shared.formats.text_source import Reading, markers
from shared.formats.tools import Tool

_MAX_KEY_CHARACTERS = 256
_OTHER_TYPES = ALL_TYPES - {"string"}

Kind = Literal["schema", "string", "json"]


@dataclass(frozen=True, slots=True)
class ValueTag:
    """How a value opens, and what that says of it: a string, JSON, or what the tool's schema says."""

    text: str
    kind: Kind = "schema"


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    r"""The arguments between tags.

    Attributes:
        key_open: What stands before a key.
        key_close: What stands behind it.
        value_open: What stands before a value, one for each kind of value. One "\n" at its end belongs to the tag.
        value_close: What stands behind a value. One "\n" at its beginning belongs to the tag.
        end: What stands behind all of them, or the beginning of it.
        separator: What stands behind each argument.
    """

    key_open: str
    key_close: str
    value_open: tuple[ValueTag, ...]
    value_close: str
    end: str
    separator: str = "\n"

    def read(self, call: CallReading) -> Reading[bool]:
        """Read the arguments, as many as there are."""
        source = call.source
        opening = "{"
        while True:
            yield from source.skip_space()
            found = yield from source.next_of(markers(self.key_open, self.end))
            if found and not call.has_started:
                call.start()
            if found != self.key_open:
                break
            yield from source.accept(found)
            key = yield from self._read_key(call)
            kind = yield from self._read_opening(call)
            if key is None or kind is None:
                found = ""
                break
            call.arguments(f'{opening}"{escaped(key)}": ')
            opening = ", "
            if not (yield from self._read_value(call, self._types(call, key, kind))):
                return False
        if not call.has_started or (source.has_ended and not found):
            return False
        call.arguments("{}" if opening == "{" else "}")
        return True

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return the arguments that the schema names, in their order, if the tool is strict; else any."""
        if not (tool.strict and tool.parameters):
            return f"{self._any_argument(lark)}*"
        schema = strict_schema(tool)
        written = []
        for key in schema.properties:
            values = " | ".join(self._values(lark, schema, key))
            argument = lark.rule("argument", f"{lark.literal(self.key_open + key + self.key_close)} ( {values} )")
            written.append(argument if key in schema.required else f"{argument}?")
        return " ".join(written)

    def _read_key(self, call: CallReading) -> Reading[str | None]:
        parts: list[str] = []
        while (length := sum(map(len, parts))) <= _MAX_KEY_CHARACTERS:
            text, found = yield from call.source.until(markers(self.key_close), _MAX_KEY_CHARACTERS + 1 - length)
            parts.append(text)
            if found and length + len(text) <= _MAX_KEY_CHARACTERS:
                yield from call.source.accept(found)
                return "".join(parts).strip()
            if call.source.has_ended:
                return None
        return None

    def _read_opening(self, call: CallReading) -> Reading[Kind | None]:
        source = call.source
        if len(self.value_open) > 1:
            yield from source.skip_space()
            found = yield from source.accept(*(each.text.strip() for each in self.value_open))
            kinds = {each.text.strip(): each.kind for each in self.value_open}
            return kinds.get(found)
        only = self.value_open[0]
        tag = only.text.strip()
        if tag and not (yield from source.accept_spaced(only.text.rstrip())):
            return None
        if only.text.endswith("\n"):
            yield from source.accept("\n")
        return only.kind

    def _types(self, call: CallReading, key: str, kind: Kind) -> frozenset[str]:
        if kind == "string":
            return frozenset({"string"})
        return call.schema.types(key) if kind == "schema" else _OTHER_TYPES

    def _read_value(self, call: CallReading, types: frozenset[str]) -> Reading[bool]:
        """Read a value and its close: a string as it comes, anything else when it is complete."""
        if types == {"string"}:
            call.arguments('"')
            is_whole = yield from self._read_text(call, lambda text: call.arguments(escaped(text)))
            call.arguments('"' if is_whole else "")
            return is_whole
        parts: list[str] = []
        if "string" not in types:
            yield from call.source.skip_space()
            if (yield from call.source.peek()) in ("[", "{"):
                # The close may stand in a string of it.
                yield from read_value(call.source, parts.append, call.closes)
        is_whole = yield from self._read_text(call, parts.append)
        text = "".join(parts)
        call.arguments(as_json(text, types) if is_whole or "string" in types else text.strip())
        return is_whole

    def _read_text(self, call: CallReading, tell: Callable[[str], None]) -> Reading[bool]:
        closes = markers(self.value_close, self.value_close.strip())
        while True:
            text, found = yield from call.source.until(closes)
            tell(text)
            if found:
                yield from call.source.accept(found)
            if found or call.source.has_ended:
                return bool(found)

    def _values(self, lark: LarkText, schema: ArgumentsSchema, key: str) -> list[str]:
        """Return the texts that may stand behind a key, from the opening of the value to the separator."""
        string = next(each for each in self.value_open if each.kind != "json")
        other = next(each for each in self.value_open if each.kind != "string")
        types = schema.types(key)
        end = lark.literal(self.value_close + self.separator)
        values = []
        if "string" in types:
            text = raw_string(lark, schema, schema.properties[key], self.value_close)
            values.append(f"{lark.literal(string.text)} {text} {lark.literal(self.separator)}")
        if types != {"string"}:
            value = json_value(lark, schema, key, types - {"string"})
            values.append(f"{lark.literal(other.text)} {value} {end}")
        return values

    def _any_argument(self, lark: LarkText) -> str:
        key = lark.terminal("KEY", r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/")
        values = []
        for each in self.value_open:
            if each.kind == "json":
                value = f"{lark.of_types(_OTHER_TYPES)} {lark.literal(self.value_close)}"
            else:
                value = lark.through(self.value_close, (self.value_close.strip(),))
            values.append(f"{lark.literal(each.text)} {value} {lark.literal(self.separator)}")
        key_open, key_close = lark.literal(self.key_open), lark.literal(self.key_close)
        return lark.rule("argument", f"{key_open} {key} {key_close} ( {' | '.join(values)} )")


# GLM 4.5 and later: the name, then keys and values between tags.
_GLM_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM = ChatFormat(
    name="glm",
    marks=(("<arg_key>",),),
    reasoning=ThinkTags(),
    calls=(
        CallForm(
            opens=("<tool_call>",),
            parts=(
                Name(),
                Fixed("\n"),
                TaggedArguments(
                    key_open="<arg_key>",
                    key_close="</arg_key>",
                    value_open=(ValueTag("\n<arg_value>"),),
                    value_close="</arg_value>",
                    end="</tool_call>",
                ),
            ),
            closes=("</tool_call>",),
            between="\n",
        ),
    ),
    tokens=(*_GLM_TAGS, *THINK_TOKENS),
)

# Qwen 3 Coder and its successors: tags of XML for the function and for each parameter.
_QWEN_PARAMETERS = TaggedArguments(
    key_open="<parameter=",
    key_close=">",
    value_open=(ValueTag("\n"),),
    value_close="\n</parameter>",
    end="</function>",
)
_QWEN_FUNCTION = (Name(), Fixed(">\n"), _QWEN_PARAMETERS, Fixed("</function>"))
_QWEN_CALLS = (
    CallForm(
        opens=("<tool_call>",),
        begin="\n<function=",
        parts=_QWEN_FUNCTION,
        closes=("\n</tool_call>", "</tool_call>"),
        between="\n",
    ),
    # The models often forget the outer tag.
    CallForm(opens=("<function=",), parts=_QWEN_FUNCTION, closes=("</tool_call>",)),
)

QWEN_CODER = ChatFormat(
    name="qwen-coder", marks=(("<function=", "<parameter="),), calls=_QWEN_CALLS, tokens=("<tool_call>", "</tool_call>")
)

QWEN_CODER_THINKING = QWEN_CODER.thinking()

# MiniMax M2: tags of XML with the names as attributes.
MINIMAX = ChatFormat(
    name="minimax",
    marks=(("minimax:tool_call",),),
    reasoning=ThinkTags(),
    calls=(
        CallForm(
            opens=("<minimax:tool_call>",),
            parts=(
                Fixed('\n<invoke name="'),
                Name(),
                Fixed('">\n'),
                TaggedArguments(
                    key_open='<parameter name="',
                    key_close='">',
                    value_open=(ValueTag(""),),
                    value_close="</parameter>",
                    end="</invoke>",
                ),
                Fixed("</invoke>"),
            ),
            separator="",
            closes=("\n</minimax:tool_call>", "</minimax:tool_call>"),
        ),
    ),
    tokens=("<minimax:tool_call>", "</minimax:tool_call>", *THINK_TOKENS),
)

DEEPSEEK_V32 = ChatFormat(
    name="deepseek-v3.2",
    marks=(("｜DSML｜",),),
    reasoning=ThinkTags(),
    calls=(
        CallForm(
            opens=("<｜DSML｜function_calls>",),
            parts=(
                Fixed('\n<｜DSML｜invoke name="'),
                Name(),
                Fixed('">\n'),
                TaggedArguments(
                    key_open='<｜DSML｜parameter name="',
                    key_close='"',
                    value_open=(ValueTag(' string="true">', "string"), ValueTag(' string="false">', "json")),
                    value_close="</｜DSML｜parameter>",
                    end="</｜DSML｜invoke>",
                ),
                Fixed("</｜DSML｜invoke>"),
            ),
            separator="",
            closes=("\n</｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ),
    ),
    dropped=("<｜end▁of▁sentence｜>",),
    tokens=THINK_TOKENS,
    keeps_special_tokens=True,
)
