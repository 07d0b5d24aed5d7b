"""The tools of Anthropic's bodies, of which those of chat are made."""

from __future__ import annotations

from gateway.anthropic.body import PromptBody, ToolBody, ToolChoiceBody
from gateway.anthropic.client_tools import CLIENT_TOOLS
from gateway.api.schemas import tools as chat
from gateway.api.schemas.refusals import invalid_value, missing_parameter, unknown_parameter, unsupported_parameter
from gateway.api.schemas.texts import require_text

_WITH_CHARACTERS = "text_editor_20250728"
# Dates follow, and there are more with each of them.
_SCREENS = ("computer_", "browser_")
_OF_SERVERS = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")


def message_tools(body: PromptBody) -> chat.OfferedTools:
    """Return what becomes of the tools of a body.

    Raises:
        ApiError: 400; a tool is not served, two have one name, or the choice names none of them.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise invalid_value("tool_choice", "'tool_choice' demands a tool, but 'tools' has none.")
        return chat.NO_TOOLS
    tools = [_tool(tool, f"tools.[{index}]") for index, tool in enumerate(body.tools)]
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    places = [f"tools.[{index}].input_schema" for index in range(len(tools))]
    return chat.offered_tools(tools, None if choice is None else _choice(choice), is_parallel, places)


def _tool(tool: ToolBody, where: str) -> chat.ToolBody:
    function = _own(tool, where) if tool.type in (None, "custom") else _defined(tool, where)
    return chat.ToolBody(function=function)


def _own(tool: ToolBody, where: str) -> chat.FunctionBody:
    if tool.name is None:
        raise missing_parameter(f"{where}.name")
    if tool.description is not None:
        require_text(f"{where}.description", tool.description)
    _refuse_characters(tool, where)
    return chat.FunctionBody(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )


def _defined(tool: ToolBody, where: str) -> chat.FunctionBody:
    """Return a tool that Anthropic has defined."""
    kind = tool.type or ""
    defined = CLIENT_TOOLS.get(kind)
    if defined is None:
        raise unsupported_parameter(f"{where}.type", f"'{where}.type' is '{kind}'. {_why_not(kind)}")
    if tool.name != defined.name:
        raise invalid_value(f"{where}.name", f"'{where}.name' must be '{defined.name}' where 'type' is '{kind}'.")
    for name in ("description", "input_schema"):
        if getattr(tool, name) is not None:
            message = f"'{where}.{name}' is known where 'type' is '{kind}'. Leave it out, or the type."
            raise invalid_value(f"{where}.{name}", message)
    description = defined.description
    if tool.max_characters is not None:
        if kind != _WITH_CHARACTERS:
            _refuse_characters(tool, where)
        description += f" A file that is viewed is shown up to its character {tool.max_characters}."
    return chat.FunctionBody(
        name=defined.name, description=description, parameters=defined.schema(), strict=tool.strict
    )


def _refuse_characters(tool: ToolBody, where: str) -> None:
    if tool.max_characters is not None:
        hint = f" It belongs to a tool of the type '{_WITH_CHARACTERS}'."
        raise unknown_parameter(f"{where}.max_characters", hint)


def _why_not(kind: str) -> str:
    """Return why a type of tools is not served, and what to do."""
    if kind.startswith(_SCREENS):
        return "It works on screenshots, and this server reads no images. Offer tools that return text."
    if kind.startswith(_OF_SERVERS):
        return "The server would have to run it, and this one runs no tools. Offer a tool that the client runs."
    known = ", ".join(CLIENT_TOOLS)
    return f"No such tool is known here. Known are {known}, and 'custom' for a tool with its own 'input_schema'."


def _choice(choice: ToolChoiceBody) -> str | chat.ToolChoiceBody:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    # Other than a function that is named in chat, the tool may be called several times.
    named = chat.NamedTool(function=chat.NamedFunction(name=choice.name or ""))
    allowed = chat.AllowedTools(mode="required", tools=[named])
    return chat.ToolChoiceBody(type="allowed_tools", allowed_tools=allowed)
