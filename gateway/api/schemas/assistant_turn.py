"""An assistant's message that is put together from the blocks or items in which some APIs write it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.conversation import ChatMessage, ToolCall


@dataclass(slots=True)
class AssistantTurn:
    """The parts of one message, each kind in its order."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added yet."""
        return not (self.content or self.reasoning or self.calls)

    def message(self) -> ChatMessage:
        """Return the message."""
        return ChatMessage(
            role="assistant",
            content="".join(self.content),
            reasoning="".join(self.reasoning) or None,
            tool_calls=tuple(self.calls),
        )
