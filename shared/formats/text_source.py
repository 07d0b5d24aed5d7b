"""Text that arrives in pieces, read by generators that wait where more text is needed to decide.

A generator yields to wait for more text. The unread text is at most a prefix of a marker that is searched for, so that
reading takes time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from functools import lru_cache
from typing import TypeVar


class Markers:
    """Texts that are looked for, prepared once."""

    def __init__(self, texts: Iterable[str]) -> None:
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
        """Return True if all that is left of `text` is the beginning of one of the texts, or nothing."""
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
    """Return the finder of these texts, the same one for the same texts."""
    return Markers(texts)


T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACE = " \t\n\r"


class TextSource:
    """Owns the arrived text, the position of the reader, and a record of the text read since `mark`.

    Attributes:
        text: The arrived text, without parts that were read long ago.
        at: Where the unread part begins.
        has_ended: No more text will arrive.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.has_ended = False
        self._record: list[str] | None = None

    def append(self, piece: str) -> None:
        """Add text that has arrived."""
        self.text = self.text[self.at :] + piece
        self.at = 0

    def mark(self) -> None:
        """Begin to record the text that is read."""
        self._record = []

    def recorded(self) -> str:
        """Return the text read since `mark`, and record no more."""
        record, self._record = self._record, None
        return "".join(record or ())

    def rewind(self) -> None:
        """Make the text read since `mark` unread, and record anew."""
        self.text = self.recorded() + self.text[self.at :]
        self.at = 0
        self.mark()

    def take(self, end: int) -> str:
        """Read up to a place in `text`."""
        taken = self.text[self.at : end]
        self.at = min(end, len(self.text))
        if self._record is not None:
            self._record.append(taken)
        return taken

    def is_empty(self) -> bool:
        """Return True if everything that has arrived is read."""
        return self.at == len(self.text)

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self.is_empty() and not self.has_ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Reading[None]:
        """Read white space."""
        yield from self.skip(_SPACE)

    def skip(self, characters: str) -> Reading[None]:
        """Read as long as any of these characters comes next."""
        behind = re.compile(f"[^{re.escape(characters)}]")
        while True:
            match = behind.search(self.text, self.at)
            self.take(match.start() if match else len(self.text))
            if match or self.has_ended:
                return
            yield

    def accept(self, *texts: str) -> Reading[str]:
        """Read one of the texts if it comes next, the longest that fits, and return it; "" if none does."""
        found = yield from self.next_of(markers(*texts))
        self.take(self.at + len(found))
        return found

    def next_of(self, sought: Markers) -> Reading[str]:
        """Return which of the texts comes next, without reading it; "" if none does."""
        while sought.may_begin(self.text, self.at) and not self.has_ended:
            yield
        return sought.at(self.text, self.at)

    def accept_spaced(self, text: str) -> Reading[bool]:
        """Read a text in which white space may be other or absent, and return whether it came next."""
        words = text.split()
        if text[:1].isspace():
            yield from self.skip_space()
        for index, word in enumerate(words):
            if index:
                yield from self.skip_space()
            if not (yield from self.accept(word)):
                return False
        if text[-1:].isspace():
            yield from self.skip_space()
        return True

    def until(self, sought: Markers, most: int | None = None) -> Reading[tuple[str, str]]:
        """Read what has arrived before the next of the texts.

        Args:
            sought: The texts.
            most: Characters to read at most, of which there is at least one.

        Returns:
            Text, and which of the texts comes behind it, unread. "" for none: there is more text, or it has ended.
        """
        while True:
            end, found = sought.find(self.text, self.at)
            if not self.has_ended:
                if not found:
                    end = sought.beginning(self.text, self.at)
                elif sought.may_begin(self.text, end):
                    # It may yet turn out to be the beginning of a longer one.
                    found = ""
            if most is not None and end - self.at > most:
                end, found = self.at + most, ""
            if found or end > self.at or self.has_ended:
                return self.take(end), found
            yield
