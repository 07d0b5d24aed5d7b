"""The tools of Anthropic's bodies, of which those of chat are made."""

from __future__ import annotations

from gateway.anthropic.body import PromptBody, ToolBody, ToolChoiceBody
from gateway.api.schemas import tools as chat
from gateway.api.schemas.decoding import require_text
from gateway.api.schemas.refusals import invalid_value, unsupported_parameter


def message_tools(body: PromptBody) -> chat.OfferedTools:
    """Return what becomes of the tools of a body.

    Raises:
        ApiError: 400; a tool runs at Anthropic, two have one name, or the choice names none of them.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise invalid_value("tool_choice", "'tool_choice' demands a tool, but 'tools' has none.")
        return chat.NO_TOOLS
    tools = [_tool(tool, f"tools.[{index}]") for index, tool in enumerate(body.tools)]
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    return chat.offered_tools(tools, None if choice is None else _choice(choice), is_parallel)


def _tool(tool: ToolBody, where: str) -> chat.ToolBody:
    if tool.type not in (None, "custom"):
        message = f"'{where}.type' is '{tool.type}', a tool that Anthropic runs. Only tools of the client are served."
        raise unsupported_parameter(f"{where}.type", message)
    if tool.description is not None:
        require_text(f"{where}.description", tool.description)
    return chat.ToolBody(
        function=chat.FunctionBody(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
    )


def _choice(choice: ToolChoiceBody) -> str | chat.ToolChoiceBody:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    # Other than a function that is named in chat, the tool may be called several times.
    named = chat.NamedTool(function=chat.NamedFunction(name=choice.name or ""))
    allowed = chat.AllowedTools(mode="required", tools=[named])
    return chat.ToolChoiceBody(type="allowed_tools", allowed_tools=allowed)
