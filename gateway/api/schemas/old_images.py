"""Replaces the images of earlier turns by a note, where the operator allows that: a text model can go on with the rest.

Only images before the last message of the user are replaced: that message is what the answer is about.
"""

from __future__ import annotations

from typing import Any

import msgspec

NOTE = "[image left out: this model reads text]"

_TYPES = frozenset({"image_url", "input_image", "image"})
_MARKS = (b'"image_url"', b'"input_image"', b'"image"')
_TEXT_TYPES = {"input_image": "input_text"}


def without_old_images(body: bytes) -> bytes:
    """Return a body of chat completions, responses or messages without the images of earlier turns.

    A body that is not JSON, or has no images, is returned as it is.
    """
    if not any(mark in body for mark in _MARKS):
        return body
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    messages = None if not isinstance(fields, dict) else fields.get("messages", fields.get("input"))
    if not isinstance(messages, list):
        return body
    last = max((i for i, message in enumerate(messages) if _is_of_user(message)), default=-1)
    changed = [_replace(message) for message in messages[: max(last, 0)]]
    return msgspec.json.encode(fields) if any(changed) else body


def _is_of_user(message: Any) -> bool:
    """Tell whether a message is the user's own; Anthropic's clients send the results of tools as the user's."""
    if not isinstance(message, dict) or message.get("role") != "user":
        return False
    content = message.get("content")
    types = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return not types or set(types) != {"tool_result"}


def _replace(holder: Any) -> bool:
    """Replace the images in a message, and in the results of tools in it; return whether there were any."""
    changed = False
    for name in ("content", "output") if isinstance(holder, dict) else ():
        parts = holder.get(name)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and part.get("type") in _TYPES:
                parts[i] = {"type": _TEXT_TYPES.get(part["type"], "text"), "text": NOTE}
                changed = True
            else:
                changed |= _replace(part)
    return changed
