"""What a family is described by: its think tags and the forms of its calls. Frozen values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from shared.formats.parts.part import Part


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
