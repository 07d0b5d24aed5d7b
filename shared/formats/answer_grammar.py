"""The grammar of a whole answer, from a family's description: reasoning, content, calls.

What it allows, the reader of the same description understands as the same calls. It allows less than the reader
understands: models write the first form of everything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from shared.formats.description import CallForm, ThinkTags
from shared.formats.lark_text import LarkText, joined
from shared.formats.parts.json_arguments import CallObject
from shared.formats.tools import Tool, naming_tool
from shared.grammar import Grammar, decode_schema, grammar_text, llguidance_schema

_SPACE = r"/[ \n]{1,4}/"


class AnswerGrammar:
    """Builds the grammar of one answer."""

    def __init__(
        self,
        lark: LarkText,
        tags: ThinkTags | None,
        forms: Sequence[CallForm],
        content_open: str,
        tools: Sequence[Tool],
        *,
        is_parallel: bool,
    ) -> None:
        """Constrain an answer that may begin with reasoning between `tags`, and may call `tools`."""
        for tool in tools:
            if tool.strict and tool.parameters:
                with naming_tool(tool):
                    decode_schema(tool.parameters)
        self._lark = lark
        self._tags = tags
        self._form = forms[0] if forms and tools else None
        self._opens = tuple(each for form in forms for each in form.opens) if tools else ()
        self._content_open = content_open
        self._tools = tools
        self._is_parallel = is_parallel

    def of_calls(self) -> Grammar:
        """Return the grammar of an answer that has to call."""
        return self._answer(self._calls())

    def of_content(self, content: Grammar) -> Grammar:
        """Return the grammar of an answer with content of a grammar, or with calls where there are tools."""
        body = f"{self._lark.literal(self._content_open)} {content_rule(self._lark, content)}"
        return self._answer(f"{body} | {self._calls_beside_json()}" if self._form else body)

    def of_text(self) -> Grammar:
        """Return the grammar of an answer of free text in which calls, once they open, keep to their form."""
        form = self._form
        assert form is not None
        text = self._lark.text(self._opens)
        if form.bare_pattern:
            free = self._lark.text(self._opens, f"{text} & ~( /{form.bare_pattern}/ /(?s:.*)/ )")
            return self._answer(f"{free} | {self._calls()}")
        if self._content_open:
            return self._answer(f"{self._lark.literal(self._content_open)} {text} | {self._calls()}")
        others = tuple(each for each in self._opens if each != form.opens[0])
        block = self._lark.rule("block", f"{self._lark.through(form.opens[0], others)} {self._block()}")
        return self._answer(f"{block}* {text}" if self._is_parallel else f"{text} | {block}")

    def _answer(self, body: str) -> Grammar:
        answer = self._lark.rule("answer", body)
        if self._tags is None:
            return Grammar(kind="lark", source=self._lark.source(answer))
        space = self._lark.terminal("SPACE", _SPACE)
        close = self._lark.through(self._tags.closes[0], (*self._tags.closes[1:], *self._opens))
        behind = self._lark.literal(self._tags.behind)
        thought = f"{close} {space}? {behind} {answer}"
        if self._form and self._form.opens and not self._content_open:
            # A call ends reasoning that was not closed.
            opened = self._lark.through(self._form.opens[0], (*self._tags.closes, *self._opens))
            thought += f" | {opened} {self._block()} {self._more_blocks()}"
        thought = self._lark.rule("thought", thought)
        start = f"{space}? {self._lark.literal(self._tags.opens[0])} {thought} | {answer}"
        return Grammar(kind="lark", source=self._lark.source(start), in_reasoning=thought)

    def _calls(self) -> str:
        assert self._form is not None
        opening = "" if self._form.bare_pattern else self._lark.literal(self._form.opens[0])
        return f"{opening} {self._block()} {self._more_blocks()}"

    def _calls_beside_json(self) -> str:
        """Return an expression for calls where the answer may be JSON instead.

        llguidance takes two alternatives that begin with a bracket together only if both are schemas.
        """
        assert self._form is not None
        part = self._form.parts[0]
        if not self._form.bare_pattern or not isinstance(part, CallObject):
            return self._calls()
        for tool in self._tools:
            if tool.strict and tool.parameters:
                # Where all are one schema, nothing says any more whose is at fault.
                with naming_tool(tool):
                    llguidance_schema(decode_schema(tool.parameters), strict=True)
        calls = [part.schema(tool, f"#/anyOf/{index}") for index, tool in enumerate(self._tools)]
        return self._lark.schema({"anyOf": calls})

    def _more_blocks(self) -> str:
        form = self._form
        assert form is not None
        if not self._is_parallel or form.separator is not None or form.is_closed_by_end:
            return ""
        return f"( {self._lark.literal(form.between + form.opens[0])} {self._block()} )*"

    def _block(self) -> str:
        form = self._form
        assert form is not None
        more = ""
        if form.separator is not None and self._is_parallel:
            more = f"( {self._call(form.separator)} )*"
        close = "" if form.is_closed_by_end or not form.closes else self._lark.literal(form.closes[0])
        return f"{self._call(form.begin)} {more} {close}"

    def _call(self, before: str) -> str:
        assert self._form is not None
        calls = []
        for tool in self._tools:
            with naming_tool(tool):
                parts = [part.lark(self._lark, tool) for part in self._form.parts]
            calls.append(joined(" ".join((self._lark.literal(before), *parts))))
        return self._lark.rule("call", " | ".join(calls))


# Strings, regular expressions, comments, and names, of which the last group is the one that may be `start`.
_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|([A-Za-z_][\w-]*)')


def content_rule(lark: LarkText, content: Grammar) -> str:
    """Write a grammar of any kind as a rule, and return its name."""
    if content.kind == "json_schema":
        return lark.schema(decode_schema(content.source), coerces_one_of=not content.strict)
    (grammar,) = msgspec.json.decode(grammar_text(content))["grammars"]
    name = "content"
    lark.add(_TOKENS.sub(lambda found: name if found.group(1) == "start" else found.group(), grammar["lark_grammar"]))
    return name
