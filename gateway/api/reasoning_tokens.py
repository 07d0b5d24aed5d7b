"""How many tokens of a choice were reasoning, told from what a reader makes of its text."""

from __future__ import annotations

from collections.abc import Sequence

from shared.formats.events import OutputEvent, ReasoningText, ToolCallStart


class ReasoningTokens:
    """Counts the tokens of one choice.

    The marks around reasoning count with it, but for those before a call: most of them are the call's. Where one step
    brought reasoning and something else, its tokens are shared out by the lengths of the texts.

    Attributes:
        count: Tokens of reasoning so far.
    """

    __slots__ = ("_is_reasoning", "_num_unread", "count")

    def __init__(self) -> None:
        """Start at 0."""
        self.count = 0
        self._is_reasoning = False
        # Tokens whose text the reader has not told yet, or has dropped.
        self._num_unread = 0

    def note(self, num_tokens: int, events: Sequence[OutputEvent]) -> None:
        """Take in the tokens of one step, and what was read in it. The first branch is the usual step."""
        if len(events) == 1 and not self._num_unread:
            self._is_reasoning = type(events[0]) is ReasoningText
            if self._is_reasoning:
                self.count += num_tokens
            return
        self._num_unread += num_tokens
        if not events:
            return
        is_behind = self._is_reasoning and not isinstance(events[0], ToolCallStart)
        is_marks = is_behind or isinstance(events[0], ReasoningText)
        num_marks = self._num_unread - num_tokens if is_marks else 0
        num_reasoning = sum(_length(event) for event in events if isinstance(event, ReasoningText))
        if num_reasoning:
            num_marks += round(num_tokens * num_reasoning / sum(map(_length, events)))
        self.count += num_marks
        self._num_unread = 0
        self._is_reasoning = isinstance(events[-1], ReasoningText)

    def end(self) -> None:
        """Count what was left unread when the text ended."""
        if self._is_reasoning:
            self.count += self._num_unread
        self._num_unread = 0


def _length(event: OutputEvent) -> int:
    return len(event.name) if isinstance(event, ToolCallStart) else len(event.text)
