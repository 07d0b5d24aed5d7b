"""How a family of models writes reasoning and tool calls: a description, from which reader and grammar are derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.formats.answer_grammar import AnswerGrammar
from shared.formats.description import THINK_TOKENS, CallForm, ThinkTags
from shared.formats.events import OutputReader, PlainReader
from shared.formats.lark_text import LarkText
from shared.formats.output_reader import FormatReader
from shared.formats.tools import Tool, ToolChoice
from shared.grammar import Grammar


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
