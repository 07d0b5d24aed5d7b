"""The names in the bodies of Anthropic's Messages API: served, ignored or refused; and which fields a block may have.

A field that belongs to another type of block would be left out in silence, so it is refused. Calls that Anthropic's
server ran itself, and their results, are read as the use of a tool and its result. A result keeps only text that a
model can read: encrypted parts and the bytes of files are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Raw, UnsetType

from gateway.anthropic.body import (
    BlockBody,
    CountTokensBody,
    MessageBody,
    MessagesBody,
    MessageStreamOptions,
    OutputBody,
    PromptBody,
    SourceBody,
    ThinkingBody,
)
from gateway.api.schemas.bodies import OPENAI_NAMES
from gateway.api.schemas.checks import given, unknown_parameter
from gateway.api.schemas.names import Kind, OtherTypes, ParameterTable, Row, ignored, refused

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
_MAX_RESULT_DEPTH = 16


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
    """Return a value without notes, encrypted parts and files, and without parts that this leaves empty."""
    if depth > _MAX_RESULT_DEPTH:
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


_OF_TYPE = MappingProxyType(
    {
        "text": {"text"},
        "thinking": {"thinking"},
        "redacted_thinking": set[str](),
        "tool_use": {"id", "name", "input"},
        "tool_result": {"tool_use_id", "content", "is_error"},
        "image": {"source"},
        "document": {"source", "title", "context"},
        "search_result": {"source", "title", "content"},
        **{kind: {"id", "name", "input"} for kind in HOSTED_CALLS},
        **{kind: {"tool_use_id", "content", "is_error"} for kind in HOSTED_RESULTS},
    }
)


@dataclass(frozen=True, slots=True)
class _Foreign:
    """The fields that blocks of a type do not have. All are read at once: a body may hold a hundred thousand blocks."""

    names: tuple[str, ...]
    values: Callable[[BlockBody], tuple[object, ...]]
    absent: tuple[object, ...]


def _foreign(own: set[str]) -> _Foreign:
    names = tuple(name for name in BlockBody.__struct_fields__ if name not in own | {"type", "cache_control"})
    values = attrgetter(*names)
    return _Foreign(names, values, values(BlockBody(type="")))


# Whatever a block of another type holds, it is refused by its type.
_FOREIGN = MappingProxyType({kind: _foreign(own) for kind, own in _OF_TYPE.items()})

# The result of a tool holds a document, which holds text. Whatever lies deeper is refused by its type.
_MAX_DEPTH = 3


def check_block_fields(body: PromptBody) -> None:
    """Refuse fields that the type of a block does not have."""
    if isinstance(body.system, list):
        _check(body.system, "system")
    for index, message in enumerate(body.messages):
        if isinstance(message.content, list):
            _check(message.content, f"messages.[{index}].content")


def _check(blocks: Sequence[BlockBody], where: str, depth: int = 1) -> None:
    if depth > _MAX_DEPTH:
        return
    for index, block in enumerate(blocks):
        foreign = _FOREIGN.get(block.type)
        if foreign is not None and foreign.values(block) != foreign.absent:
            _refuse_given(block, foreign.names, f"{where}.[{index}]")
        if isinstance(block.content, list):
            _check(block.content, f"{where}.[{index}].content", depth + 1)
        if isinstance(block.source, SourceBody) and isinstance(block.source.content, list):
            _check(block.source.content, f"{where}.[{index}].source.content", depth + 1)


def _refuse_given(block: BlockBody, names: Sequence[str], place: str) -> None:
    for name in names:
        if _is_given(getattr(block, name)):
            raise unknown_parameter(f"{place}.{name}", f" A block of type '{block.type}' has no such field.")


def _is_given(value: object) -> bool:
    return (given(value) if isinstance(value, Raw | UnsetType) else value) is not None


class Anthropic(Kind):
    """An object in a body of this API."""

    MESSAGES = "POST /v1/messages"
    COUNT_TOKENS = "POST /v1/messages/count_tokens"
    TURN = "A message of /v1/messages"
    BLOCK = "A block of a message of /v1/messages"
    SOURCE = "The source of a block of /v1/messages"
    OUTPUT_CONFIG = "output_config of /v1/messages"
    THINKING = "thinking of /v1/messages"
    STREAM_OPTIONS = "stream_options of /v1/messages"


_BLOCK_TYPES = frozenset(
    {"text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result"}
)
_BOTH = (Anthropic.MESSAGES, Anthropic.COUNT_TOKENS)
_FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


def _refused(
    name: str, instead: str, example: object, without_effect: tuple[object, ...] = (), kinds: tuple[Kind, ...] = _BOTH
) -> Row:
    return refused(name, instead, example, without_effect, *kinds)


_ROWS = (
    ignored(
        "block_binding", "Thinking is taken as it is.", {"prefix_mismatch_behavior": "drop_block"}, Anthropic.THINKING
    ),
    _refused(
        "task_budget",
        "No model here has learned to count it down. Use 'max_tokens', and end the loop at the client.",
        {"type": "tokens", "total": 20000},
        kinds=(Anthropic.OUTPUT_CONFIG,),
    ),
    ignored("metadata", "Names the end user to Anthropic.", {"user_id": "someone"}, *_BOTH),
    ignored("service_tier", "There is one tier.", "auto", *_BOTH),
    ignored("speed", "There is one speed.", "standard", *_BOTH),
    ignored("diagnostics", "They tell why Anthropic's cache missed.", {"previous_message_id": None}, *_BOTH),
    ignored("billing_policy", "Nothing is billed here.", {"type": "billing_policy"}, *_BOTH),
    ignored("fallback_credit_token", "Nothing is billed here.", "abc", *_BOTH),
    ignored("inference_geo", "The queue chooses the worker.", "us", *_BOTH),
    ignored("cache_control", "It does not change the prompt.", {"type": "ephemeral"}, Anthropic.COUNT_TOKENS),
    *(
        ignored(name, "It does not change the prompt.", example, Anthropic.COUNT_TOKENS)
        for name, example in (
            ("max_tokens", 10),
            ("temperature", 0.5),
            ("top_p", 0.9),
            ("top_k", 40),
            ("stop_sequences", ["END"]),
            ("stream", True),
            ("stream_options", {"resumable": True}),
            ("output_config", {"effort": "low"}),
            ("output_format", _FORMAT),
        )
    ),
    _refused("container", "Tools run at the client.", "c_1"),
    _refused("mcp_servers", "Ask the servers at the client, and send their tools in 'tools'.", [{"type": "url"}]),
    _refused(
        "context_management",
        "Shorten the conversation at the client.",
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        # Claude Code sends the second with every request.
        ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    _refused("compaction", "Shorten the conversation at the client.", {"type": "compaction"}),
    _refused("fallbacks", "Name one model.", [{"model": "other"}], ([],)),
    _refused("thread", "Send the whole conversation.", {"type": "create"}),
    _refused("clear_at", "Leave the message out of the next request.", "next_user_message", kinds=(Anthropic.TURN,)),
    _refused("output_config", "Write it into the body itself.", {"effort": "low"}, kinds=(Anthropic.TURN,)),
    ignored("citations", "No answer cites.", {"enabled": False}, Anthropic.BLOCK),
    ignored(
        "signature", "Proves to Anthropic that thinking is its own; thinking is taken as it is.", "abc", Anthropic.BLOCK
    ),
    ignored("data", "Thinking that only Anthropic can read.", "abc", Anthropic.BLOCK),
    ignored("caller", "Who used a tool: always the model.", {"type": "direct"}, Anthropic.BLOCK),
    ignored("toolset_name", "Of which of Anthropic's sets the tool is.", "browser", Anthropic.BLOCK),
)

ANTHROPIC_NAMES = ParameterTable(
    {
        Anthropic.MESSAGES: MessagesBody,
        Anthropic.COUNT_TOKENS: CountTokensBody,
        Anthropic.TURN: MessageBody,
        Anthropic.BLOCK: BlockBody,
        Anthropic.SOURCE: SourceBody,
        Anthropic.OUTPUT_CONFIG: OutputBody,
        Anthropic.THINKING: ThinkingBody,
        Anthropic.STREAM_OPTIONS: MessageStreamOptions,
    },
    _ROWS,
    {Anthropic.BLOCK: OtherTypes(_BLOCK_TYPES, read_hosted_block)},
    beside=OPENAI_NAMES,
)
