"""How long a conversation is: by this a gateway refuses what no worker can hold."""

from __future__ import annotations

import pytest

from shared.conversation import ChatMessage, ChatOptions, Conversation, ToolCall
from shared.media import ContentImage


def test_every_text_of_a_conversation_counts() -> None:
    messages = (
        ChatMessage(role="user", content="a" * 10, name="b" * 20),
        ChatMessage(
            role="assistant",
            content="",
            reasoning="c" * 30,
            tool_calls=(ToolCall(id="d" * 40, name="e" * 50, arguments="f"),),
        ),
        ChatMessage(role="tool", content="g" * 60, tool_call_id="h" * 70),
    )
    roles = len("user") + len("assistant") + len("tool")
    assert Conversation(messages).num_characters == roles + 10 + 20 + 30 + 40 + 50 + 1 + 60 + 70
    options = ChatOptions(tools="i" * 80, variables="j" * 90, template="k" * 100)
    assert Conversation((), options).num_characters == 80 + 90 + 100


@pytest.mark.parametrize(
    ("content", "part_lengths", "images", "expected"),
    [
        ("ab", (), ((0, 0),), (0, "ab")),
        ("ab", (), ((1, 0),), ("ab", 0)),
        ("", (), ((0, 1), (0, 0)), (1, 0)),
        ("abc", (1, 2), ((1, 0), (2, 1)), ("a", 0, "bc", 1)),
        ("abc", (1, 2), ((0, 2), (9, 1)), (2, "a", "bc", 1)),
        ("abc", (1, 2), (), ("a", "bc")),
    ],
)
def test_images_stand_between_the_texts_of_a_content(
    content: str, part_lengths: tuple[int, ...], images: tuple[tuple[int, int], ...], expected: tuple[str | int, ...]
) -> None:
    message = ChatMessage(
        role="user", content=content, part_lengths=part_lengths, images=tuple(ContentImage(*each) for each in images)
    )
    assert message.texts_and_images == expected
