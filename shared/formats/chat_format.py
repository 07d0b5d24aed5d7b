"""How a family of models writes reasoning and tool calls: a description, from which reader and grammar are derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.formats.events import OutputReader, PlainReader
from shared.formats.tools import Tool, ToolChoice
from shared.sampling import Grammar


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One family.

    Attributes:
        name: Of the family, as a worker announces it.
        special_tokens: Those of its markers that are special tokens in the family's vocabularies. A worker that
            constrains or shows them treats them as ordinary text.
    """

    name: str
    special_tokens: tuple[str, ...] = ()

    @property
    def has_reasoning(self) -> bool:
        """Whether the family can think before it answers."""
        return False

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the reader needs special tokens in the text, so that `Sampling.skip_special_tokens` has to be off."""
        return bool(self.special_tokens)

    def starts_in_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Return whether the answer to a prompt begins inside reasoning, because the prompt itself has opened it.

        Args:
            prompt: The rendered prompt; its end suffices.
            continued: The beginning of the answer that the prompt ends with (`continue_final_message`).
        """
        return False

    def reader(self, tools: Sequence[Tool] = (), *, starts_in_reasoning: bool = False) -> OutputReader:
        """Return a reader of one answer.

        Args:
            tools: Those that the answer may call. Without any the markup of calls is content.
            starts_in_reasoning: The prompt has opened the reasoning.
        """
        return PlainReader()

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool = True,
        content: Grammar | None = None,
        reasoning: bool = True,
    ) -> Grammar | None:
        """Return what the answer must look like; None where nothing is constrained.

        Args:
            tools: Those that may be called.
            choice: Whether they must be.
            parallel: The answer may have more than one call.
            content: What the content must look like, where it is no call.
            reasoning: The answer may begin with reasoning.
        """
        return content
