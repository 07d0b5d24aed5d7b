"""What is kept of the items of a request: what a later request reads of them, and nothing else; and the ids of items.

Only this is part of a prompt and so counts as tokens. Whatever else an item holds, however large, is not stored. The id
of an item names its response, so that it can be found by itself.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

from gateway.responses.body import ItemBody, PartBody, Parts
from gateway.responses.hosted_items import HOSTED_ITEMS

_OF_ALL = ("type", "id", "status")
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "name", "output"),
    # What was encrypted is content by now.
    "reasoning": ("content", "summary"),
    "compaction": ("encrypted_content",),
    **dict.fromkeys(HOSTED_ITEMS, ("call_id", "name", "namespace", "arguments", "output")),
}


def kept_item(item: ItemBody) -> ItemBody:
    """Return an item without the fields that its type does not have, and without a second form of its text."""
    names = (*_OF_ALL, *_FIELDS.get(item.type or "message", ()))
    values: dict[str, Any] = {name: _kept_value(getattr(item, name)) for name in names}
    kept = ItemBody(**values)
    return _one_form(kept) if kept.type == "reasoning" else kept


def listed_item(item: ItemBody) -> dict[str, Any]:
    """Return an item as it is listed: its content is a list of parts."""
    fields: dict[str, Any] = msgspec.to_builtins(item)
    if isinstance(item.content, str):
        is_own = item.role == "assistant"
        part = {"type": "output_text" if is_own else "input_text", "text": item.content}
        fields["content"] = [part | {"annotations": []} if is_own else part]
    return fields


def _kept_value(value: str | Parts | None) -> str | Parts | None:
    return [_kept_part(part) for part in value] if isinstance(value, list) else value


def _kept_part(part: PartBody) -> PartBody:
    if part.type == "refusal":
        return PartBody(type=part.type, refusal=part.refusal)
    return PartBody(type=part.type, text=part.text)


def _one_form(item: ItemBody) -> ItemBody:
    """Return reasoning in the form that is read of it: its content, else its summary."""
    return msgspec.structs.replace(item, summary=[]) if item.content else item


_SUFFIX = r"[0-9a-f]{32}"
_RESPONSE = re.compile(rf"resp_({_SUFFIX})")
_ITEM = re.compile(rf"[a-z]{{1,8}}_({_SUFFIX})[0-9a-f]{{4,8}}")
# Numbers of input items begin here, those of output items at 0.
_FIRST_INPUT = 0x8000


def new_response_id() -> str:
    """Return an id that nobody has had or can guess."""
    return f"resp_{secrets.token_hex(16)}"


def is_response_id(text: str) -> bool:
    """Say whether a text may be the id of a response."""
    return _RESPONSE.fullmatch(text) is not None


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
