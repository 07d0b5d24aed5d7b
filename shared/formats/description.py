"""What a family is described by: its think tags and the forms of its calls. Frozen values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared.formats.call_reading import CallReading
from shared.formats.lark_text import LarkText
from shared.formats.text_source import Reading
from shared.formats.tools import Tool


class Part(Protocol):
    """A part of a call, as a model writes it. It keeps nothing of a call."""

    def read(self, call: CallReading) -> Reading[bool]:
        """Read the part, which comes next in the call's source; return True if it was there and complete."""

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return the part of a call of `tool` as an expression of Lark."""


THINK_TOKENS = ("<think>", "</think>")
"""The tags of most families, which may be tokens of their own."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """How reasoning stands in the text.

    Attributes:
        opens: Texts that open it. Models write the first.
        closes: Texts that end it. Models write the first.
        behind: What models write between the end of the reasoning and what follows, besides white space.
        is_anywhere: It may be opened behind content too. Otherwise only at the beginning, and behind a call.
    """

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    behind: str = ""
    is_anywhere: bool = False


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls stand in the text: `open`, a call or several with separators, `close`.

    Attributes:
        opens: Texts that open a block of calls anywhere. Models write the first.
        parts: Of one call.
        begin: What stands behind the opening, before the first call.
        bare_opens: Texts that open a block only where the answer begins; "" for none at all.
        bare_pattern: What calls without an opening begin with, as a regular expression, if models write them so.
        separator: What stands between calls of one block; None where a block holds one call.
        closes: Texts that end the block. Models write the first. It may be absent when the text is read.
        is_closed_by_end: Models end the answer instead of writing the close.
        between: What models write between blocks.
    """

    opens: tuple[str, ...]
    parts: tuple[Part, ...]
    begin: str = ""
    bare_opens: tuple[str, ...] = ()
    bare_pattern: str = ""
    separator: str | None = None
    closes: tuple[str, ...] = ()
    is_closed_by_end: bool = False
    between: str = ""
