"""Texts of clients that spell a special token, as ordinary text in a prompt that only the template may structure.

A mark that nobody can guess is put into each spelled special token before the template is rendered. The rendered text
is cut at the marks and its parts are encoded apart, so that no special token comes of them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from itertools import pairwise
from typing import Any


def new_mark() -> str:
    """Return digits that nobody can guess."""
    return str(secrets.randbits(96)).zfill(29)


class SpelledTokens:
    """The special tokens of one tokenizer."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take their texts. One character cannot be broken up; a special token that short is not protected."""
        spelled = [re.escape(name) for name in names if len(name) > 1]
        self._pattern = re.compile(f"(?=({'|'.join(spelled)}))") if spelled else None

    def shield(self) -> Shield:
        """Return what protects one prompt."""
        return Shield(self._pattern, new_mark())


class Shield:
    """Puts the marks into the texts of one prompt.

    Attributes:
        mark: Digits: whatever a template does with cases or JSON leaves them as they are.
    """

    def __init__(self, pattern: re.Pattern[str] | None, mark: str) -> None:
        """Mark what `pattern` finds."""
        self._pattern = pattern
        self.mark = mark

    def text(self, text: str) -> str:
        """Return a text with a mark after the first character of every special token that it spells."""
        if self._pattern is None:
            return text
        starts = [match.start() for match in self._pattern.finditer(text)]
        if not starts:
            return text
        bounds = [0, *(start + 1 for start in starts), len(text)]
        return self.mark.join(text[begin:end] for begin, end in pairwise(bounds))

    def value(self, value: Any) -> Any:
        """Return what JSON was decoded to with marks in all its texts, keys too.

        Raises:
            RecursionError: It is nested too deeply.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.value(each) for each in value]
        return value
