"""Texts of clients that spell a special token, as ordinary text in a prompt that only the template may structure.

A random mark is put into each spelled special token before the template is rendered. The rendered text
is cut at the marks and its parts are encoded apart, so that no special token comes of them: `PartEncoder`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

# Stands for the text before a mark. No vocabulary holds this character of Unicode's private use area.
_BEFORE = "\uf8e1"


class PartEncoder:
    """Encodes the parts between marks as parts of one text.

    Tokenizers in the style of SentencePiece put a space before every text. What stands behind a mark is not text of its
    own: it is encoded behind the template's special token before it, or else behind any character.
    """

    def __init__(self, encode: Callable[[str, int | None], list[int]], special: Mapping[int, str]) -> None:
        self._encode = encode
        self._special = special
        self._adds_space = self._behind(_BEFORE, "a", None) != encode("a", None)

    def encode(self, text: str, mark: str, max_tokens: int | None) -> list[int]:
        """Return the token ids of a text with marks; `PromptTooLongError` if a part has more than `max_tokens`."""
        before, *parts = text.split(mark)
        token_ids = self._encode(before, max_tokens)
        for part in filter(None, parts):
            if self._adds_space and token_ids:
                name = self._special.get(token_ids[-1], "")
                token_ids += self._behind(name if name and before.endswith(name) else _BEFORE, part, max_tokens)
            else:
                token_ids += self._encode(part, max_tokens)
            before = part
        return token_ids

    def _behind(self, before: str, part: str, max_tokens: int | None) -> list[int]:
        whole, first = self._encode(before + part, max_tokens), self._encode(before, None)
        return whole[len(first) :] if whole[: len(first)] == first else self._encode(part, max_tokens)


def new_mark() -> str:
    """Return random digits, which no client can guess."""
    return str(secrets.randbits(96)).zfill(29)


class SpelledTokens:
    """The special tokens of one tokenizer."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = [name for name in names if len(name) > 1]
        self.pattern = re.compile(f"(?=({'|'.join(map(re.escape, self._names))}))") if self._names else None
        self.beginnings = frozenset(name[:end] for name in self._names for end in range(1, len(name)))
        # One character is not a threat: the template would have to write all the rest.
        self.ends = frozenset(name[begin:] for name in self._names for begin in range(1, len(name) - 1))
        self.first_characters = frozenset(name[0] for name in self._names)
        self.last_characters = frozenset(name[-1] for name in self._names)
        self.longest = max(map(len, self._names), default=0)

    def shield(self) -> Shield:
        """Return the shield of one prompt."""
        return Shield(self, new_mark())


class Shield:
    """Puts the marks, digits that survive cases and JSON, into the texts of one prompt."""

    def __init__(self, spelled: SpelledTokens, mark: str) -> None:
        self._spelled = spelled
        self.mark = mark

    def text(self, text: str) -> str:
        """Return a text with marks where it spells a special token, or the beginning or the end of one.

        One stands behind the first character of each; one at the text's edge parts it from what the template writes
        there.
        """
        spelled = self._spelled
        if spelled.pattern is None:
            return text
        before = self.mark if self._has_end(text) else ""
        behind = self.mark if self._has_beginning(text) else ""
        starts = [match.start() for match in spelled.pattern.finditer(text)]
        if starts:
            bounds = [0, *(start + 1 for start in starts), len(text)]
            text = self.mark.join(text[begin:end] for begin, end in pairwise(bounds))
        return before + text + behind if before or behind else text

    def _has_beginning(self, text: str) -> bool:
        tail = text[-self._spelled.longest :]
        if self._spelled.first_characters.isdisjoint(tail):
            return False
        return any(tail[at:] in self._spelled.beginnings for at in range(len(tail)))

    def _has_end(self, text: str) -> bool:
        head = text[: self._spelled.longest]
        if self._spelled.last_characters.isdisjoint(head):
            return False
        return any(head[:end] in self._spelled.ends for end in range(1, len(head) + 1))

    def value(self, value: Any) -> Any:
        """Return what JSON was decoded to with marks in all its texts, keys too; may raise `RecursionError`."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.value(each) for each in value]
        return value
