"""The tools that a client offers, which of them the answer has to call, and the older form of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from gateway.api.schemas.checks import invalid_value, missing_parameter, unsupported_parameter
from gateway.api.schemas.conversation import Name
from gateway.api.schemas.names import described
from gateway.generation import ToolUse
from shared.bounds import MAX_TOOLS
from shared.formats import Tool, ToolChoice

MAX_TOOLS_BYTES = 1 << 20
MAX_SCHEMA_KEYS = 1024

_FORMS_OF_CHOICE = "'none', 'auto', 'required', or an object that names a function or the allowed tools"

FunctionName = Annotated[str, Meta(max_length=64, pattern=r"^[a-zA-Z0-9_-]+\Z")]
Choice = Annotated[str, Meta(max_length=64)]
Parameters = Annotated[dict[Name, Raw], Meta(max_length=MAX_SCHEMA_KEYS)]


class FunctionBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: Annotated[FunctionName, described("At most 64 letters, digits, `_` and `-`.")]
    description: Annotated[str | None, described("What it does, for the model.", "Adds.")] = None
    parameters: Annotated[
        Parameters | None, described("JSON schema of the object of its arguments.", {"type": "object"})
    ] = None
    strict: Annotated[bool | None, described("The arguments keep to the schema.", True)] = None


class ToolBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; functions are the only ones."""

    type: Annotated[Choice, described("Always `function`.")] = "function"
    function: Annotated[FunctionBody | None, described("The function.")] = None


class NamedFunction(Struct, kw_only=True):
    """A function by its name."""

    name: Name


class NamedTool(Struct, kw_only=True):
    """A tool by the name of its function."""

    type: Choice = "function"
    function: NamedFunction | None = None


class AllowedTools(Struct, kw_only=True, forbid_unknown_fields=True):
    """Some of the tools, and whether one of them has to be called."""

    mode: Choice
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A choice that names tools."""

    type: Choice = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolBodies = Annotated[
    Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None,
    described("Functions that the answer may call.", [{"type": "function", "function": {"name": "f"}}]),
]
FunctionBodies = Annotated[list[FunctionBody], Meta(max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a body as they are used."""

    use: ToolUse | None = None
    template: str | None = None


NO_TOOLS = OfferedTools()


def offered_tools(
    tools: list[ToolBody] | None,
    choice: str | ToolChoiceBody | None,
    is_parallel: bool = True,
    schema_places: Sequence[str] | None = None,
) -> OfferedTools:
    """Return the tools of `tools` and `tool_choice`. The template is shown only those that may be called.

    `schema_places` says where in the body the schema of each tool stands; None for where chat has them.
    """
    if tools is None and choice is None:
        return NO_TOOLS
    functions = [_function(tool, index) for index, tool in enumerate(tools or ())]
    _check_names(functions, "tools")
    if schema_places is None:
        schema_places = [f"tools.[{index}].function.parameters" for index in range(len(functions))]
    places = {function.name: place for function, place in zip(functions, schema_places, strict=True)}
    allowed = choice.allowed_tools if isinstance(choice, ToolChoiceBody) and choice.type == "allowed_tools" else None
    if isinstance(choice, ToolChoiceBody) and allowed is None:
        function = _find(functions, _named(choice.type, choice.function), "tool_choice", "tools")
        return _offered([function], ToolUse((), ToolChoice("named", function.name), False), places)
    mode = choice if isinstance(choice, str) else "auto"
    if allowed is not None:
        mode, functions = _allowed(allowed, functions)
    if mode == "none":
        return NO_TOOLS
    if mode not in ("auto", "required"):
        raise invalid_value("tool_choice", f"'tool_choice' must be {_FORMS_OF_CHOICE}.")
    if mode == "required" and not functions:
        raise invalid_value("tool_choice", "'tool_choice' is 'required', but there are no 'tools'.")
    # The client would do what it has forbidden for this turn, if that were called.
    how = ToolChoice("required" if mode == "required" else "auto")
    use = ToolUse((), how, is_parallel, is_exclusive=allowed is not None)
    return _offered(functions, use, places) if functions else NO_TOOLS


def offered_functions(functions: list[FunctionBody] | None, choice: str | NamedFunction | None) -> OfferedTools:
    """Return the tools of `functions` and `function_call`, the form before tools: at most one call an answer."""
    _check_names(functions or (), "functions")
    places = {each.name: f"functions.[{index}].parameters" for index, each in enumerate(functions or ())}
    if isinstance(choice, NamedFunction):
        function = _find(functions or (), choice.name, "function_call", "functions")
        use = ToolUse((), ToolChoice("named", function.name), is_parallel=False, is_function_call=True)
        return _offered([function], use, places)
    if choice not in (None, "auto", "none"):
        raise invalid_value("function_call", "'function_call' must be 'none', 'auto', or {\"name\": \"...\"}.")
    if choice == "none" or not functions:
        return NO_TOOLS
    use = ToolUse((), ToolChoice("auto"), is_parallel=False, is_function_call=True)
    return _offered(functions, use, places)


def _offered(functions: Sequence[FunctionBody], use: ToolUse, places: Mapping[str, str]) -> OfferedTools:
    schemas = [None if each.parameters is None else msgspec.json.encode(each.parameters) for each in functions]
    tools = tuple(
        Tool(each.name, None if schema is None else schema.decode(), bool(each.strict))
        for each, schema in zip(functions, schemas, strict=True)
    )
    template = msgspec.json.encode([_shown(each, schema) for each, schema in zip(functions, schemas, strict=True)])
    if len(template) > MAX_TOOLS_BYTES:
        param = "functions" if use.is_function_call else "tools"
        raise invalid_value(param, f"'{param}' must be at most {MAX_TOOLS_BYTES} bytes of JSON.")
    schema_places = tuple(places[each.name] for each in functions)
    return OfferedTools(replace(use, tools=tools, schema_places=schema_places), template.decode())


def _allowed(allowed: AllowedTools, functions: Sequence[FunctionBody]) -> tuple[str, list[FunctionBody]]:
    if allowed.mode not in ("auto", "required"):
        raise invalid_value("tool_choice", "'tool_choice.allowed_tools.mode' must be 'auto' or 'required'.")
    names = dict.fromkeys(_named(tool.type, tool.function) for tool in allowed.tools)
    return allowed.mode, [_find(functions, name, "tool_choice", "tools") for name in names]


def _shown(function: FunctionBody, schema: bytes | None) -> dict[str, object]:
    """Return a tool as templates expect it, with the keys in the order of the models' training.

    A description that the client leaves out is left out, as `transformers` renders it: models saw no empty ones.
    """
    described = {} if function.description is None else {"description": function.description}
    parameters = Raw(schema or b'{"type":"object","properties":{}}')
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def _function(tool: ToolBody, index: int) -> FunctionBody:
    where = f"tools.[{index}]"
    if tool.type != "function":
        message = f"'{where}' is a tool of type '{tool.type}'; only 'function' is supported."
        raise unsupported_parameter(f"{where}.type", message)
    if tool.function is None:
        raise missing_parameter(f"{where}.function")
    return tool.function


def _check_names(functions: Sequence[FunctionBody], param: str) -> None:
    names = {function.name for function in functions}
    if len(names) < len(functions):
        raise invalid_value(param, f"Two of '{param}' have the same name.")


def _named(kind: str, function: NamedFunction | None) -> str:
    if kind != "function" or function is None:
        raise invalid_value("tool_choice", f"'tool_choice' must be {_FORMS_OF_CHOICE}.")
    return function.name


def _find(functions: Sequence[FunctionBody], name: str, param: str, where: str) -> FunctionBody:
    for function in functions:
        if function.name == name:
            return function
    raise invalid_value(param, f"'{param}' names '{name[:64]}', which is none of '{where}'.")
