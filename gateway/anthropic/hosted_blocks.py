"""Blocks of `/v1/messages` that only Anthropic's server writes: calls that it ran itself, and what they brought.

They are read as the use of a tool and its result. Of a result remains what a model can read: what is encrypted, and the
bytes of files, were never text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

HOSTED_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})
HOSTED_RESULTS = frozenset(
    {
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_result",
    }
)
NO_TEXT = "(The result has no text.)"

_FIELDS = ("type", "id", "name", "input", "tool_use_id", "is_error")
# Notes about a result, for Anthropic's server and its client alone.
_NOTES = frozenset({"type", "signature", "cache_control", "citations", "caller", "file_id"})
# A fetched page is four levels deep.
_MAX_DEPTH = 16


def read_hosted_block(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return a block of a type that no client writes by itself, its result as a text, or its type alone."""
    kind = msgspec.json.decode(fields["type"])
    if kind not in HOSTED_CALLS and kind not in HOSTED_RESULTS:
        return {"type": fields["type"]}
    read = {name: fields[name] for name in _FIELDS if name in fields}
    if kind in HOSTED_RESULTS and "content" in fields:
        read["content"] = Raw(msgspec.json.encode(_text(msgspec.json.decode(fields["content"]))))
    return read


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, dict) and "error_code" in content:
        return f"Error: {content['error_code']}"
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "\n\n".join(part["text"] for part in content)
    readable = _readable(content)
    return msgspec.json.encode(readable).decode() if readable else NO_TEXT


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _readable(value: Any, depth: int = 1) -> Any:
    """Return a value without notes, encrypted parts, files, and what is empty without them."""
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, list):
        parts = [_readable(each, depth + 1) for each in value]
        return [part for part in parts if not _is_empty(part)]
    if not isinstance(value, dict):
        return value
    is_file = value.get("type") == "base64"
    read = {}
    for name, each in value.items():
        if name in _NOTES or name.startswith("encrypted_") or (is_file and name == "data"):
            continue
        part = _readable(each, depth + 1)
        if not _is_empty(part):
            read[name] = part
    return read


def _is_empty(value: Any) -> bool:
    return value is None or value in ([], {})
