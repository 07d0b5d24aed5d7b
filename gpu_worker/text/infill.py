"""Prompts for a text between a prefix and a suffix, by the tokens that mark them in public models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """What stands before the text that is wanted, and what behind it."""

    prefix: str
    suffix: str


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The tokens before prefix, suffix and output. Without `middle`, the suffix goes first and the output last."""

    prefix: int
    suffix: int
    middle: int | None

    def prompt(self, prefix_ids: list[int], suffix_ids: list[int]) -> list[int]:
        """Return the token ids of a prompt, without the tokens that begin every prompt."""
        if self.middle is None:
            return [self.suffix, *suffix_ids, self.prefix, *prefix_ids]
        return [self.prefix, *prefix_ids, self.suffix, *suffix_ids, self.middle]


# StarCoder and Granite; Qwen and CodeGemma; SantaCoder; DeepSeek; Code Llama; CodeGeeX; Codestral.
_NAMES = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("[PREFIX]", "[SUFFIX]", None),
)


def find_infill_tokens(token_id: Callable[[str], int | None]) -> InfillTokens | None:
    """Return the tokens of a vocabulary, in which `token_id` looks up names; None if it has none."""
    for prefix_name, suffix_name, middle_name in _NAMES:
        prefix, suffix = token_id(prefix_name), token_id(suffix_name)
        middle = None if middle_name is None else token_id(middle_name)
        if prefix is not None and suffix is not None and (middle is None) == (middle_name is None):
            return InfillTokens(prefix, suffix, middle)
    return None
