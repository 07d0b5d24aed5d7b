"""Ids of responses and of their items. The id of an item names its response, so that it can be found by itself."""

from __future__ import annotations

import re
import secrets

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
