"""How long a conversation is: by this a gateway refuses what no worker can hold."""

from __future__ import annotations

from shared.conversation import ChatMessage, ChatOptions, Conversation, ToolCall


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
