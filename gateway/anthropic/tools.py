"""The tools of Anthropic's bodies, made into chat's.

Anthropic's own models know the arguments of the tools that Anthropic has defined and the client runs, so its clients
send a type and a name alone. Other models are shown a description and a JSON schema of the same arguments.

Source: Anthropic's documentation of the bash, text editor and memory tools; `anthropic.types.beta` for memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Raw

from gateway.anthropic.body import PromptBody, ToolBody, ToolChoiceBody
from gateway.api.schemas import tools as chat
from gateway.api.schemas.checks import (
    invalid_value,
    missing_parameter,
    require_text,
    unknown_parameter,
    unsupported_parameter,
)

Property = Mapping[str, Any]


def _text(description: str) -> Property:
    return {"type": "string", "description": description}


def _number(description: str) -> Property:
    return {"type": "integer", "minimum": 0, "description": description}


_LINES: Property = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For view: the first and the last line to show, from 1; -1 as the last is the end of the file.",
}


def _command(names: tuple[str, ...]) -> Property:
    return {"type": "string", "enum": list(names), "description": "What to do."}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """One tool.

    Attributes:
        name: The only one that it may have.
        description: What the model reads.
        properties: The arguments by name, as JSON schemas.
        required: Those that every call has.
    """

    name: str
    description: str
    properties: Mapping[str, Property]
    required: tuple[str, ...] = ()

    def schema(self) -> dict[str, Raw]:
        """Return the schema of the arguments."""
        schema = {
            "type": "object",
            "properties": dict(self.properties),
            "required": list(self.required),
            "additionalProperties": False,
        }
        return {name: Raw(msgspec.json.encode(value)) for name, value in schema.items()}


_BASH = ClientTool(
    "bash",
    "Runs a command in a bash shell that lives on from call to call, and returns what it prints. Give `command`, or "
    "`restart` to begin with a new shell.",
    {
        "command": _text("The command to run. Needed unless the shell is restarted."),
        "restart": {"type": "boolean", "description": "True: end the shell and start another."},
    },
)


def _editor(name: str, insert_text: str, *, has_undo: bool) -> ClientTool:
    commands = ("view", "create", "str_replace", "insert", *(("undo_edit",) if has_undo else ()))
    undo = " `undo_edit` takes the last change of a file back." if has_undo else ""
    new_text = "For str_replace: what takes its place; nothing if left out."
    if insert_text == "new_str":
        new_text += " For insert: the text to put in."
    properties = {
        "command": _command(commands),
        "path": _text("The file or directory."),
        "file_text": _text("For create: what the file is to hold."),
        "old_str": _text(
            "For str_replace: the text to replace, exactly as it stands in the file, where it must occur only once."
        ),
        "new_str": _text(new_text),
        "insert_line": _number("For insert: the line behind which the text goes; 0 is before the first."),
        "view_range": _LINES,
    }
    if insert_text != "new_str":
        properties[insert_text] = _text("For insert: the text to put in.")
    return ClientTool(
        name,
        "Shows and changes text files. `view` shows a file with its line numbers, or lists a directory; `create` "
        f"writes a file; `str_replace` replaces a text in it; `insert` puts a text behind a line.{undo}",
        properties,
        ("command", "path"),
    )


_MEMORY = ClientTool(
    "memory",
    "Keeps notes from conversation to conversation, in files below /memories. Look there before you begin, and write "
    "down what will be needed later. `view` shows a file or lists a directory; `create` writes a file; `str_replace` "
    "replaces a text in it; `insert` puts a text behind a line; `delete` removes a file or "
    "directory; `rename` moves it.",
    {
        "command": _command(("view", "create", "str_replace", "insert", "delete", "rename")),
        "path": _text("The file or directory; for all but rename."),
        "view_range": _LINES,
        "file_text": _text("For create: what the file is to hold."),
        "old_str": _text("For str_replace: the text to replace, exactly as it stands in the file."),
        "new_str": _text("For str_replace: the replacement."),
        "insert_line": _number("For insert: the line behind which the text goes; 0 is before the first."),
        "insert_text": _text("For insert: the text to put in."),
        "old_path": _text("For rename: the path to move."),
        "new_path": _text("For rename: the new path."),
    },
    ("command",),
)
_OLD_EDITOR = _editor("str_replace_editor", "new_str", has_undo=True)
_EDITOR = _editor("str_replace_based_edit_tool", "insert_text", has_undo=False)

CLIENT_TOOLS: Mapping[str, ClientTool] = MappingProxyType(
    {
        "bash_20241022": _BASH,
        "bash_20250124": _BASH,
        "text_editor_20241022": _OLD_EDITOR,
        "text_editor_20250124": _OLD_EDITOR,
        "text_editor_20250429": _EDITOR,
        "text_editor_20250728": _EDITOR,
        "memory_20250818": _MEMORY,
    }
)
"""By the type that a body names."""


_WITH_CHARACTERS = "text_editor_20250728"
# Dates follow, and there are more with each of them.
_SCREENS = ("computer_", "browser_")
_OF_SERVERS = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")


def message_tools(body: PromptBody) -> chat.OfferedTools:
    """Return what becomes of the tools of a body."""
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
