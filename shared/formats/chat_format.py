"""How a family of models writes reasoning and tool calls: a description, from which reader and grammar are derived.

What the grammar of a whole answer allows, the reader of the same description understands as the same calls. It allows
less than the reader understands: models write the first form of everything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shared.formats.description import THINK_TOKENS, CallForm, ThinkTags
from shared.formats.events import OutputReader, PlainReader
from shared.formats.lark_text import LarkText, joined
from shared.formats.output_reader import FormatReader
from shared.formats.parts.json_arguments import CallObject
from shared.formats.tools import Tool, ToolChoice, naming_tool
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


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One family.

    Attributes:
        name: Of the family, as a worker announces it.
        marks: Texts by which a chat template of the family is known: all of one of the tuples stand in it.
        reasoning: How reasoning stands in the text, if the family can think.
        calls: How calls stand in the text. Models write the first form; all are read.
        content_open: What models write before content that is not free text.
        dropped: Markers that say nothing to a client.
        tokens: Those of all markers that may be tokens of their own in the family's vocabularies.
        keeps_special_tokens: Some of them are special tokens, which have to be left in the text for the reader:
            `Sampling.skip_special_tokens` has to be off.
    """

    name: str
    marks: tuple[tuple[str, ...], ...] = ()
    reasoning: ThinkTags | None = None
    calls: tuple[CallForm, ...] = ()
    content_open: str = ""
    dropped: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    keeps_special_tokens: bool = False

    def thinking(self, **changes: Any) -> ChatFormat:
        """Return the format of the family's models that also think between tags, with other fields as given."""
        marks = tuple((*marks, THINK_TOKENS[1]) for marks in self.marks)
        tokens = (*self.tokens, *THINK_TOKENS)
        fields = {"name": f"{self.name}-thinking", "marks": marks, "reasoning": ThinkTags(), "tokens": tokens}
        return replace(self, **{**fields, **changes})

    @property
    def has_reasoning(self) -> bool:
        """Whether the family can think before it answers."""
        return self.reasoning is not None

    def is_spoken_by(self, template: str) -> bool:
        """Return True if a chat template speaks this format."""
        return any(all(mark in template for mark in marks) for marks in self.marks)

    def starts_in_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Return whether the answer to a prompt begins inside reasoning, because the prompt itself has opened it.

        Args:
            prompt: The rendered prompt; its end suffices.
            continued: The beginning of the answer that the prompt ends with (`continue_final_message`).
        """
        if self.reasoning is None:
            return False
        opened = max(continued.rfind(each) for each in self.reasoning.opens)
        closed = max(continued.rfind(each) for each in self.reasoning.closes)
        end = prompt.rstrip()
        return opened > closed or any(end.endswith(each.rstrip()) for each in self.reasoning.opens)

    def reader(
        self, tools: Sequence[Tool] = (), *, starts_in_reasoning: bool = False, is_exclusive: bool = False
    ) -> OutputReader:
        """Return a reader of one answer.

        Args:
            tools: Those that the answer may call. Without any the markup of calls is content.
            starts_in_reasoning: The prompt has opened the reasoning.
            is_exclusive: Nothing else is called: what looks like a call of another tool is content.
        """
        if self.reasoning is None and not self.dropped and not (self.calls and tools):
            return PlainReader()
        starts = starts_in_reasoning and self.reasoning is not None
        return FormatReader(
            self.reasoning, self.calls, self.dropped, tools, starts_in_reasoning=starts, is_exclusive=is_exclusive
        )

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool = True,
        content: Grammar | None = None,
        reasoning: bool = True,
    ) -> Grammar | None:
        """Return the grammar of the answer; None where nothing is constrained.

        Args:
            tools: Those that may be called.
            choice: Whether they must be.
            parallel: The answer may have more than one call.
            content: What the content must look like, where it is not a call.
            reasoning: The answer may begin with reasoning.

        Raises:
            ToolSchemaError: The arguments of a strict tool cannot be held to its schema.
            GrammarError: `content` is not within its bounds, or all schemas together are too large.
        """
        if not self.constrains(tools, choice, content):
            return None
        tools = self._callable(tools, choice)
        tags = self.reasoning if reasoning else None
        if not tools and tags is None and not self.content_open:
            return content
        lark = LarkText(self.tokens)
        grammar = AnswerGrammar(lark, tags, self.calls, self.content_open, tools, is_parallel=parallel)
        if tools and choice.mode in ("required", "named"):
            return grammar.of_calls()
        return grammar.of_content(content) if content else grammar.of_text()

    def constrains(self, tools: Sequence[Tool], choice: ToolChoice, content: Grammar | None = None) -> bool:
        """Whether `grammar` constrains an answer at all."""
        tools = self._callable(tools, choice)
        must_call = bool(tools) and choice.mode in ("required", "named")
        return must_call or content is not None or any(tool.strict for tool in tools)

    def _callable(self, tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
        if choice.mode == "none" or not self.calls:
            return ()
        return [tool for tool in tools if tool.name == choice.name] if choice.mode == "named" else tools
