"""Items of `/v1/responses` that only OpenAI's server writes: what of a history from there a model here can read.

A call of one of OpenAI's own tools is a call, and what it brought is its result, as of any function. What such an item
holds besides is read over: it was never part of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
from msgspec import Raw

_COMMON = ("type", "id", "status", "call_id", "name", "namespace")


@dataclass(frozen=True, slots=True)
class HostedItem:
    """How the items of one type are read.

    Attributes:
        name: The tool; None where the item names it.
        arguments: The field with the arguments, if it is a call.
        output: The fields that may hold the result; the first that is given does.
        is_whole: The arguments are that field's value, instead of an object that has it.
        runs_at_openai: The result stands in the item itself, or nowhere.
    """

    name: str | None = None
    arguments: str | None = None
    output: tuple[str, ...] = ()
    is_whole: bool = True
    runs_at_openai: bool = False


_RESULT = HostedItem(output=("output",))
HOSTED_ITEMS: Mapping[str, HostedItem] = MappingProxyType(
    {
        "web_search_call": HostedItem("web_search", "action", runs_at_openai=True),
        "file_search_call": HostedItem("file_search", "queries", ("results",), is_whole=False, runs_at_openai=True),
        "code_interpreter_call": HostedItem(
            "code_interpreter", "code", ("outputs",), is_whole=False, runs_at_openai=True
        ),
        "mcp_call": HostedItem(None, "arguments", ("output", "error"), runs_at_openai=True),
        "custom_tool_call": HostedItem(None, "input", is_whole=False),
        "custom_tool_call_output": _RESULT,
        "local_shell_call": HostedItem("local_shell", "action"),
        "local_shell_call_output": _RESULT,
        "shell_call": HostedItem("shell", "action"),
        "shell_call_output": _RESULT,
        "apply_patch_call": HostedItem("apply_patch", "operation"),
        "apply_patch_call_output": _RESULT,
        # Between OpenAI's server and its client alone.
        "mcp_list_tools": HostedItem(runs_at_openai=True),
        "mcp_approval_request": HostedItem(runs_at_openai=True),
        "mcp_approval_response": HostedItem(runs_at_openai=True),
    }
)


def read_hosted(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return an item that no client writes by itself in the fields of a call or its result, or its type alone."""
    form = HOSTED_ITEMS.get(msgspec.json.decode(fields["type"]))
    if form is None:
        return {"type": fields["type"]}
    read = {name: fields[name] for name in _COMMON if name in fields}
    if form.name is not None:
        read["name"] = Raw(msgspec.json.encode(form.name))
    if form.arguments is not None and _is_given(fields, form.arguments):
        value = fields[form.arguments]
        read["arguments"] = _text(value if form.is_whole else Raw(msgspec.json.encode({form.arguments: value})))
    output = next((name for name in form.output if _is_given(fields, name)), None)
    if output is not None:
        read["output"] = fields[output] if _has_parts(fields[output]) else _text(fields[output])
    return read


def _is_given(fields: Mapping[str, Raw], name: str) -> bool:
    return name in fields and bytes(fields[name]) != b"null"


def _has_parts(raw: Raw) -> bool:
    """Tell whether a value is a list of parts of text, as the results of the client's own tools may be."""
    if not bytes(raw).startswith(b"["):
        return False
    try:
        parts = msgspec.json.decode(raw, type=list[dict[str, Raw]])
    except msgspec.ValidationError:
        return False
    return bool(parts) and all(bytes(part.get("type", b"")) == b'"input_text"' for part in parts)


def _text(raw: Raw) -> Raw:
    """Return a value as JSON of a text: a text as it is, anything else as its JSON."""
    if bytes(raw).startswith(b'"'):
        return raw
    return Raw(msgspec.json.encode(bytes(raw).decode()))
