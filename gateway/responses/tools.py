"""The tools of a request for a response: functions in the form of this API, of which those of chat are made."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.api.schemas.conversation import Name
from gateway.api.schemas.refusals import invalid_value, missing_parameter, unsupported_parameter
from gateway.api.schemas.tools import (
    AllowedTools,
    Choice,
    FunctionBody,
    FunctionName,
    NamedFunction,
    NamedTool,
    OfferedTools,
    Parameters,
    ToolBody,
    ToolChoiceBody,
    offered_tools,
)
from shared.bounds import MAX_TOOLS


class ResponseToolBody(Struct, kw_only=True):
    """A tool. What a function has beside these fields is for tools that OpenAI runs itself."""

    type: Choice
    name: FunctionName | None = None
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class NamedToolBody(Struct, kw_only=True):
    """A tool by its name."""

    type: Choice
    name: Name | None = None


class ResponseToolChoiceBody(Struct, kw_only=True):
    """A choice that names a function, or the tools that are allowed."""

    type: Choice
    name: Name | None = None
    mode: Choice | None = None
    tools: Annotated[list[NamedToolBody], Meta(max_length=MAX_TOOLS)] | None = None


def response_tools(
    tools: list[ResponseToolBody] | None, choice: str | ResponseToolChoiceBody | None, is_parallel: bool
) -> OfferedTools:
    """Return what becomes of the tools of a request.

    Raises:
        ApiError: 400; a tool is not a function of the client, or the choice is not possible.
    """
    bodies = [_tool(tool, f"tools.[{index}]") for index, tool in enumerate(tools or ())]
    return offered_tools(bodies, choice if choice is None or isinstance(choice, str) else _choice(choice), is_parallel)


def repeated_tools(tools: list[ResponseToolBody] | None) -> list[dict[str, Any]]:
    """Return the tools as the response repeats them."""
    return [
        {
            "type": tool.type,
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": bool(tool.strict),
        }
        for tool in tools or ()
    ]


def _tool(tool: ResponseToolBody, where: str) -> ToolBody:
    if tool.type != "function":
        message = (
            f"'{where}' is of type '{tool.type}', a tool that this server does not run. Only functions are served: "
            "tools of the type 'function', which the client runs."
        )
        raise unsupported_parameter(f"{where}.type", message)
    if tool.name is None:
        raise missing_parameter(f"{where}.name")
    function = FunctionBody(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolBody(function=function)


def _choice(choice: ResponseToolChoiceBody) -> ToolChoiceBody:
    if choice.type == "allowed_tools":
        allowed = [NamedTool(type=tool.type, function=_named(tool.name)) for tool in choice.tools or ()]
        if not allowed:
            raise invalid_value("tool_choice.tools", "'tool_choice.tools' must name the allowed tools.")
        return ToolChoiceBody(type=choice.type, allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=allowed))
    if choice.type != "function":
        message = f"'tool_choice' is of type '{choice.type}', a tool that this server does not run."
        raise unsupported_parameter("tool_choice.type", message)
    return ToolChoiceBody(type=choice.type, function=_named(choice.name))


def _named(name: str | None) -> NamedFunction | None:
    return None if name is None else NamedFunction(name=name)
