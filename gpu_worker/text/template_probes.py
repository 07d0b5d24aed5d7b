"""Conversations of every kind, rendered when a chat template is loaded: what it refuses is known before a client asks.

A template that refuses a kind is served all the same: some have no system message, and many know no tools.
"""

from __future__ import annotations

from gpu_worker.text.chat_template import ChatTemplate
from gpu_worker.text.spelled_tokens import SpelledTokens
from gpu_worker.text.template_messages import template_messages
from shared.conversation import ChatMessage, ToolCall
from shared.errors import BadRequestError

_USER = ChatMessage(role="user", content="Add.")
_CALL = ToolCall(id="abcdefgh1", name="add", arguments='{"a": 1}')
_RESULT = ChatMessage(role="tool", content="1", tool_call_id="abcdefgh1")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def _called(content: str, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=(_CALL,))


KINDS: dict[str, tuple[ChatMessage, ...]] = {
    "a message of the user": (_USER,),
    "a system message": (ChatMessage(role="system", content="Be brief."), _USER),
    "several turns": (_USER, ChatMessage(role="assistant", content="1"), _USER),
    "an empty answer": (_USER, ChatMessage(role="assistant", content=""), _USER),
    "reasoning": (_USER, ChatMessage(role="assistant", content="1", reasoning="One."), _USER),
    "calls of tools": (_USER, _called(""), _RESULT),
    "calls of tools with a text": (_USER, _called("I add."), _RESULT),
    "calls of tools with reasoning": (_USER, _called("", "One."), _RESULT),
    "two rounds of tools": (_USER, _called(""), _RESULT, _called(""), _RESULT),
}


def refused_kinds(template: ChatTemplate) -> dict[str, str]:
    """Return the kinds of conversations that a template refuses, and why; the first one alone if it is among them."""
    refused: dict[str, str] = {}
    for kind, messages in KINDS.items():
        fields = template_messages(messages, template.needs, SpelledTokens([]).shield())
        tools = _TOOLS if "tools" in kind else None
        try:
            template.render(fields, add_generation_prompt=True, tools=tools)
        except BadRequestError as error:
            refused[kind] = str(error)
            if messages == (_USER,):
                break
    return refused
