"""The text of a conversation's prompt, by a chat template."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from gpu_worker.text.chat_template import ChatTemplate
from gpu_worker.text.spelled_tokens import Shield, new_mark
from gpu_worker.text.template_messages import template_messages
from shared.conversation import Conversation
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
