"""What every part of a call can do."""

from __future__ import annotations

from typing import Protocol

from shared.formats.call_reading import CallReading
from shared.formats.lark_text import LarkText
from shared.formats.text_source import Reading
from shared.formats.tools import Tool


class Part(Protocol):
    """A part of a call, as a model writes it. It keeps nothing of a call."""

    def read(self, call: CallReading) -> Reading[bool]:
        """Read the part, which comes next in the call's source; say whether it was there and complete."""

    def lark(self, lark: LarkText, tool: Tool) -> str:
        """Return the part of a call of `tool` as an expression of Lark."""
