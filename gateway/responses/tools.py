"""The tools of a request for a response: functions in the form of this API, of which those of chat are made.

Some functions stand in a namespace. A chat template knows functions alone, so the model sees such a function under its
own name, or with its namespace before it where two would have the same. The client sees both parts, as it sent them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.api.schemas.checks import invalid_value, missing_parameter, unsupported_parameter
from gateway.api.schemas.conversation import Name
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

_FUNCTION, _NAMESPACE = "function", "namespace"
# Anthropic's choices are objects, also where they name no tool.
_MODES = ("none", "auto", "required", "any")


class FunctionToolBody(Struct, kw_only=True):
    """A tool. Only functions are served; others are refused by their type, whatever else they hold."""

    type: Choice
    name: FunctionName | None = None
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class ResponseToolBody(FunctionToolBody, kw_only=True):
    """A tool, or a namespace of tools."""

    tools: Annotated[list[FunctionToolBody], Meta(max_length=MAX_TOOLS)] | None = None


class NamespacedName(Struct, frozen=True):
    """The name of a function in a namespace."""

    namespace: str
    name: str


class FlatFunction(Struct, frozen=True):
    """A function as the model sees it; `origin` is its name in its namespace, if it has one.

    `schema_place` says where in the body the schema of its parameters stands.
    """

    tool: ToolBody
    shown_name: str
    schema_place: str
    origin: NamespacedName | None = None


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


def flat_functions(tools: Sequence[ResponseToolBody] | None) -> list[FlatFunction]:
    """Return the functions of a request, those of namespaces among the others; `ApiError` 400 for other tools."""
    placed = [each for index, tool in enumerate(tools or ()) for each in _placed(tool, f"tools.[{index}]")]
    if len(placed) > MAX_TOOLS:
        raise invalid_value("tools", f"'tools' has {len(placed)} functions; at most {MAX_TOOLS} are allowed.")
    counts = Counter(tool.name for tool, _, _ in placed)
    return [_flat(tool, where, namespace, counts[tool.name] > 1) for tool, where, namespace in placed]


def namespaced_names(functions: Sequence[FlatFunction]) -> dict[str, NamespacedName]:
    """Return, by the name that the model sees, how the client names each function that stands in a namespace."""
    return {each.shown_name: each.origin for each in functions if each.origin is not None}


def response_tools(
    functions: Sequence[FlatFunction], choice: str | ResponseToolChoiceBody | None, is_parallel: bool
) -> OfferedTools:
    """Return what becomes of the tools of a request; `ApiError` 400 for equal names and impossible choices."""
    bodies, places = [each.tool for each in functions], [each.schema_place for each in functions]
    chosen = choice if choice is None or isinstance(choice, str) else _choice(choice)
    return offered_tools(bodies, chosen, is_parallel, places)


def repeated_tools(tools: Sequence[FunctionToolBody] | None) -> list[dict[str, Any]]:
    """Return the tools as the response repeats them."""
    return [_repeated(tool) for tool in tools or ()]


def _repeated(tool: FunctionToolBody) -> dict[str, Any]:
    named = {"type": tool.type, "name": tool.name, "description": tool.description}
    if isinstance(tool, ResponseToolBody) and tool.type == _NAMESPACE:
        return named | {"tools": repeated_tools(tool.tools)}
    return named | {"parameters": tool.parameters, "strict": bool(tool.strict)}


def _placed(tool: ResponseToolBody, where: str) -> Iterator[tuple[FunctionToolBody, str, str | None]]:
    if tool.type != _NAMESPACE:
        yield tool, where, None
        return
    if tool.name is None:
        raise missing_parameter(f"{where}.name")
    for index, inner in enumerate(tool.tools or ()):
        yield inner, f"{where}.tools.[{index}]", tool.name


def _flat(tool: FunctionToolBody, where: str, namespace: str | None, is_ambiguous: bool) -> FlatFunction:
    if tool.type != _FUNCTION:
        message = (
            f"'{where}' is of type '{tool.type}', a tool that this server does not run. Only functions are served: "
            "tools of the type 'function', which the client runs, by themselves or in one 'namespace'."
        )
        raise unsupported_parameter(f"{where}.type", message)
    if tool.name is None:
        raise missing_parameter(f"{where}.name")
    name = f"{namespace}__{tool.name}" if namespace is not None and is_ambiguous else tool.name
    function = FunctionBody(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    origin = None if namespace is None else NamespacedName(namespace, tool.name)
    return FlatFunction(ToolBody(function=function), name, f"{where}.parameters", origin)


def _choice(choice: ResponseToolChoiceBody) -> ToolChoiceBody:
    if choice.type == "allowed_tools":
        allowed = [NamedTool(type=tool.type, function=_named(tool.name)) for tool in choice.tools or ()]
        if not allowed:
            raise invalid_value("tool_choice.tools", "'tool_choice.tools' must name the allowed tools.")
        return ToolChoiceBody(type=choice.type, allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=allowed))
    if choice.type in _MODES:
        raise invalid_value("tool_choice", "'tool_choice' must be a text where it is 'none', 'auto' or 'required'.")
    if choice.type != "function":
        message = f"'tool_choice' is of type '{choice.type}', a tool that this server does not run."
        raise unsupported_parameter("tool_choice.type", message)
    if choice.name is None:
        raise missing_parameter("tool_choice.name")
    return ToolChoiceBody(type=choice.type, function=_named(choice.name))


def _named(name: str | None) -> NamedFunction | None:
    return None if name is None else NamedFunction(name=name)
