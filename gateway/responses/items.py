"""Reads and keeps the items of a conversation by their types, and makes the ids of items.

A call of one of OpenAI's own tools becomes a function call, and its output that call's result; the item's other fields
were never part of a prompt. Only the fields that a later request reads are stored: these go into the prompt and so
count as tokens. All other fields of an item, however large, are dropped. The id of an item names its response, so that
the item can be found by its id alone.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Raw

from gateway.responses.body import ItemBody, PartBody
from shared.bounds import RESPONSE_ID

_COMMON = ("type", "id", "status", "call_id", "name", "namespace")


@dataclass(frozen=True, slots=True)
class HostedItem:
    """How the items of one type are read.

    Attributes:
        name: The tool; None where the item names it.
        arguments: The field with the arguments, if it is a call.
        output: The fields that may hold the result; the first that is given does.
        is_whole: The arguments are that field's value instead of an object with the field.
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
    given = {name: raw for name, raw in fields.items() if bytes(raw) != b"null"}
    if form.arguments is not None and form.arguments in given:
        value = given[form.arguments]
        read["arguments"] = _text(value if form.is_whole else Raw(msgspec.json.encode({form.arguments: value})))
    output = next((given[name] for name in form.output if name in given), None)
    if output is not None:
        read["output"] = output if _has_parts(output) else _text(output)
    return read


_PARTS = frozenset({b'"input_text"', b'"input_image"'})


def _has_parts(raw: Raw) -> bool:
    """Whether a value is a list of texts and images, as the results of the client's own tools may be."""
    if not bytes(raw).startswith(b"["):
        return False
    try:
        parts = msgspec.json.decode(raw, type=list[dict[str, Raw]])
    except msgspec.ValidationError:
        return False
    return bool(parts) and all(bytes(part.get("type", b"")) in _PARTS for part in parts)


def _text(raw: Raw) -> Raw:
    """Return a value as text: a string unchanged, anything else as JSON."""
    if bytes(raw).startswith(b'"'):
        return raw
    return Raw(msgspec.json.encode(bytes(raw).decode()))


_OF_ALL = ("type", "id", "status")
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "name", "output"),
    # Encrypted content has already been decrypted into `content`.
    "reasoning": ("content", "summary"),
    "compaction": ("encrypted_content",),
    **dict.fromkeys(HOSTED_ITEMS, ("call_id", "name", "namespace", "arguments", "output")),
}


def is_left_out(item: ItemBody) -> bool:
    """Whether an item is not part of a prompt: a call that ran at OpenAI and holds no result.

    Alone it is useless to a model, and its outcome is in the message that follows.
    """
    form = HOSTED_ITEMS.get(item.type or "message")
    return form is not None and form.runs_at_openai and item.output is None


def kept_item(item: ItemBody) -> ItemBody:
    """Return an item without the fields that its type does not have, and without a second form of its text."""
    names = _OF_ALL if is_left_out(item) else (*_OF_ALL, *_FIELDS.get(item.type or "message", ()))
    values: dict[str, Any] = {name: getattr(item, name) for name in names}
    if item.type == "reasoning" and item.content:
        # Its summary is another form of the same.
        values["summary"] = []
    values |= {name: [*map(_kept_part, value)] for name, value in values.items() if isinstance(value, list)}
    return ItemBody(**values)


def listed_item(item: ItemBody) -> dict[str, Any]:
    """Return an item in its listed form: its content is a list of parts."""
    fields: dict[str, Any] = msgspec.to_builtins(item)
    if isinstance(item.content, str):
        is_own = item.role == "assistant"
        part = {"type": "output_text" if is_own else "input_text", "text": item.content}
        fields["content"] = [part | {"annotations": []} if is_own else part]
    return fields


def _kept_part(part: PartBody) -> PartBody:
    if part.type == "refusal":
        return PartBody(type=part.type, refusal=part.refusal)
    if part.type == "input_image":
        return PartBody(type=part.type, image_url=part.image_url, file_id=part.file_id, detail=part.detail)
    return PartBody(type=part.type, text=part.text)


_ITEM = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})[0-9a-f]{4,8}")
# Numbers of input items begin here, those of output items at 0.
_FIRST_INPUT = 0x8000


def new_response_id() -> str:
    """Return a new id, which cannot be guessed."""
    return f"resp_{secrets.token_hex(16)}"


def is_response_id(text: str) -> bool:
    """Whether a text may be the id of a response."""
    return RESPONSE_ID.fullmatch(text) is not None


def output_item_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of the item that stands at `index` in the output of a response."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:04x}"


def input_item_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of the item that stands at `index` in the input of a response."""
    return output_item_id(prefix, response_id, _FIRST_INPUT + index)


def response_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to; None if this server made no such id."""
    match = _ITEM.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"
