"""Finds any of several texts in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


class Markers:
    """Texts that are looked for, prepared once."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Look for each of `texts`; where several begin at the same place, for the longest."""
        self.texts = tuple(sorted({text for text in texts if text}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self.first_characters = frozenset(text[0] for text in self.texts)
        self._beginnings = frozenset(text[:length] for text in self.texts for length in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, start: int) -> tuple[int, str]:
        """Return where the first of the texts begins and which it is; the end of `text` and "" without any."""
        match = self._pattern.search(text, start)
        return (match.start(), match.group()) if match else (len(text), "")

    def at(self, text: str, start: int) -> str:
        """Return which of the texts stands at `start`; "" if none does."""
        match = self._pattern.match(text, start)
        return match.group() if match else ""

    def may_begin(self, text: str, start: int) -> bool:
        """Say whether all that is left of `text` is the beginning of one of the texts, or nothing."""
        length = len(text) - start
        return not length or (length <= self._longest and text[start:] in self._beginnings)

    def beginning(self, text: str, start: int) -> int:
        """Return where the beginning of one of the texts stands at the end of `text`; the end without any."""
        end = len(text)
        for place in range(max(start, end - self._longest), end):
            if text[place:] in self._beginnings:
                return place
        return end


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """Return what looks for these texts."""
    return Markers(texts)
