"""A reader whose text says itself what it is: `R:` reasoning, `C:` content, `S:` a call's name, `A:` its arguments.

`T:` is reasoning if the prompt has opened it, and content otherwise.
"""

from __future__ import annotations

from shared.formats.events import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart


class ScriptedReader:
    """Reads pieces separated by `|`. What follows `E:` is told when the text ends, as content."""

    def __init__(self, starts_in_reasoning: bool = False) -> None:
        self._is_reasoning = starts_in_reasoning
        self._call = -1
        self._held = ""

    def feed(self, text: str) -> list[OutputEvent]:
        return [event for piece in text.split("|") for event in self._read(piece)]

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        return [ContentText(self._held)] if self._held else []

    def _read(self, piece: str) -> list[OutputEvent]:
        kind, _, text = piece.partition(":")
        if kind == "R" or (kind == "T" and self._is_reasoning):
            return [ReasoningText(text)]
        if kind in ("C", "T"):
            return [ContentText(text)]
        if kind == "S":
            self._call += 1
            return [ToolCallStart(self._call, text)]
        if kind == "A":
            return [ToolCallArguments(self._call, text)]
        if kind == "E":
            self._held += text
        return []
