"""From Anthropic's tools and choices to what a chat template and the reader of the answer need."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.anthropic.body import PromptBody, ToolBody, ToolChoiceBody
from gateway.api.schemas.decoding import require_text
from gateway.api.schemas.raw import NULL
from gateway.api.schemas.refusals import invalid_value, unsupported_parameter
from gateway.generation import ToolUse
from shared.formats import Tool, ToolChoice

_ANY_OBJECT = msgspec.Raw(b'{"type":"object","properties":{}}')
_AUTO = ToolChoiceBody(type="auto")


def tool_use(body: PromptBody) -> ToolUse | None:
    """Return what a conversation offers; None without tools.

    Raises:
        ApiError: 400; a tool runs at Anthropic, two have one name, or the choice names none of them.
    """
    if not body.tools:
        if body.tool_choice is not None and body.tool_choice.type in ("any", "tool"):
            raise invalid_value("tool_choice", "'tool_choice' demands a tool, but 'tools' has none.")
        return None
    tools = tuple(_tool(tool, f"tools.[{index}]") for index, tool in enumerate(body.tools))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid_value(f"tools.[{index}].name", f"Two tools have the name '{name}'.")
    chosen = body.tool_choice or _AUTO
    choice = _choice(chosen, names)
    is_parallel = not chosen.disable_parallel_tool_use
    return ToolUse(() if choice.mode == "none" else tools, choice, is_parallel)


def template_tools(body: PromptBody) -> str | None:
    """Return the tools in OpenAI's form as JSON text, as chat templates expect them; None without tools."""
    if not body.tools:
        return None
    return msgspec.json.encode([_template_tool(tool) for tool in body.tools]).decode()


def _tool(tool: ToolBody, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        message = f"'{where}.type' is '{tool.type}', a tool that Anthropic runs. Only tools of the client are served."
        raise unsupported_parameter(f"{where}.type", message)
    schema = bytes(tool.input_schema).strip()
    if tool.input_schema != NULL and not schema.startswith(b"{"):
        raise invalid_value(f"{where}.input_schema", f"'{where}.input_schema' must be an object.")
    if tool.description is not None:
        require_text(f"{where}.description", tool.description)
    return Tool(tool.name, None if tool.input_schema == NULL else schema.decode(), bool(tool.strict))


def _template_tool(tool: ToolBody) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = _ANY_OBJECT if tool.input_schema == NULL else tool.input_schema
    return {"type": "function", "function": function}


def _choice(chosen: ToolChoiceBody, names: list[str]) -> ToolChoice:
    if chosen.type == "any":
        return ToolChoice("required")
    if chosen.type == "tool":
        if chosen.name not in names:
            raise invalid_value("tool_choice.name", "'tool_choice.name' must be the name of one of 'tools'.")
        return ToolChoice("named", chosen.name)
    return ToolChoice(chosen.type)
