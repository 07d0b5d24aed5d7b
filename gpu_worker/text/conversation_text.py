"""The text of a conversation's prompt, by a chat template, and the kinds of conversations that a template refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from gpu_worker.text.chat_template import ChatTemplate
from gpu_worker.text.spelled_tokens import Shield, SpelledTokens, new_mark
from gpu_worker.text.template_messages import template_messages
from shared.conversation import ChatMessage, Conversation, ToolCall
from shared.errors import BadRequestError


def conversation_text(template: ChatTemplate, conversation: Conversation, shield: Shield) -> str:
    """Return the prompt's text, with the shield's marks in it; `BadRequestError` if the template refuses."""
    options = conversation.options
    mark = new_mark()
    # As in transformers, the space shows whether the template trims contents: the continued one is trimmed then too.
    last_end = f"{mark} " if options.continue_final_message else ""
    try:
        tools = _decoded(options.tools, list[Any], "tools", shield)
        variables = _decoded(options.variables, dict[str, Any], "chat_template_kwargs", shield)
        messages = template_messages(conversation.messages, template.needs, shield, last_end)
    except RecursionError:
        raise BadRequestError("Tools, arguments or variables are nested too deeply.", "messages") from None
    render = partial(
        template.render,
        messages,
        add_generation_prompt=options.add_generation_prompt and not last_end,
        variables=variables,
    )
    try:
        text = render(tools=tools)
    except BadRequestError:
        # Some templates, gpt-oss's among them, add every description to a text, also one that is missing.
        if all(map(_has_description, tools or ())):
            raise
        text = render(tools=[_described(tool) for tool in tools])
    if not last_end:
        return text
    end = text.rfind(mark)
    if end < 0:
        message = "The model's chat template leaves out the last message, so that it cannot be continued."
        raise BadRequestError(message, "continue_final_message")
    return text[:end] if text.startswith(last_end, end) else text[:end].rstrip()


def _has_description(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return not isinstance(function, dict) or "description" in function


def _described(tool: Any) -> Any:
    return tool if _has_description(tool) else tool | {"function": {"description": "", **tool["function"]}}


def _decoded(text: str | None, kind: type[Any], param: str, shield: Shield) -> Any:
    if text is None:
        return None
    try:
        return shield.value(msgspec.json.decode(text, type=kind)) or None
    except msgspec.DecodeError as error:
        raise BadRequestError(f"{param} is not the JSON that it should be: {error}", param) from None


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
    """Return the kinds of conversations that a template refuses, and why; the first one alone if it is among them.

    A template that refuses some is served: some have no system message, and many know no tools.
    """
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
