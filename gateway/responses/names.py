"""The names in the bodies of `/v1/responses`: served, ignored or refused; and the fields of an item by its type.

Clients send back the items that this server or OpenAI's sent them: notes about an item are ignored. A field that
belongs to another type would be left out in silence, and a misspelt name would leave a function without its parameters,
so both are refused. Tools that OpenAI runs itself have names of their own, and are refused by their type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

import msgspec
from msgspec import Raw, Struct

from gateway.api.schemas.bodies import OPENAI_NAMES
from gateway.api.schemas.checks import invalid_value, unknown_parameter, unsupported_parameter
from gateway.api.schemas.names import Kind, OtherTypes, ParameterTable, Row, ignored, refused
from gateway.api.schemas.unserved_names import names_of_clients
from gateway.responses.body import (
    InputItemBody,
    InputPartBody,
    ReasoningBody,
    ResponseBody,
    ResponseStreamOptions,
    TextBody,
    TextFormatBody,
)
from gateway.responses.items import read_hosted
from gateway.responses.tools import FunctionToolBody


class Responses(Kind):
    """An object in a body of this API."""

    RESPONSE = "POST /v1/responses"
    ITEM = "An item of the input of /v1/responses"
    PART = "A part of an item of /v1/responses"
    REASONING = "reasoning of /v1/responses"
    TEXT = "text of /v1/responses"
    TEXT_FORMAT = "text.format of /v1/responses"
    STREAM_OPTIONS = "stream_options of /v1/responses"


_ITEM_TYPES = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "item_reference",
        "compaction",
        "compaction_trigger",
    }
)
_PART_TYPES = frozenset(
    {"input_text", "input_image", "output_text", "text", "summary_text", "reasoning_text", "refusal"}
)
_ITEM = (Responses.ITEM,)
_PART = (Responses.PART,)
_BOTH = (*_ITEM, *_PART)
_CACHED = "Prompts are always cached."


def _ignored(name: str, note: str, example: object) -> Row:
    return ignored(name, note, example, Responses.RESPONSE)


def _refused(name: str, instead: str, example: object, without_effect: tuple[object, ...] = ()) -> Row:
    return refused(name, instead, example, without_effect, Responses.RESPONSE)


def _noted(name: str, note: str, example: object, kinds: tuple[Kind, ...] = _ITEM) -> Row:
    return ignored(name, note, example, *kinds)


_ROWS = (
    _ignored("prompt_cache_options", "Use `prompt_cache_retention` or `agent_hints`.", {"ttl": "30m"}),
    _ignored("service_tier", "There is one tier.", "auto"),
    _ignored("client_metadata", "Codex's notes about itself.", {"session": "a"}),
    _ignored("image", "Images are prepared as their model wants them.", {"context_compression": "auto"}),
    ignored("include_obfuscation", "Streams are never padded.", False, Responses.STREAM_OPTIONS),
    ignored("include_usage", "Streams always end with usage.", True, Responses.STREAM_OPTIONS),
    ignored("continuous_usage_stats", "Streams always end with usage.", True, Responses.STREAM_OPTIONS),
    refused(
        "resumable",
        "Use 'background' with 'stream': such a response goes on without its client, and is read again.",
        True,
        (False,),
        Responses.STREAM_OPTIONS,
    ),
    _refused("conversation", "Use 'previous_response_id'.", "conv_1"),
    _refused(
        "context_management",
        "Compact the conversation at /v1/responses/compact, or with an item 'compaction_trigger'.",
        [{"type": "compaction"}],
        ([],),
    ),
    _refused("prompt", "Send the prompt itself as 'instructions' and 'input'.", {"id": "pmpt_1"}),
    _refused("moderation", "Leave it out.", {"model": "omni-moderation-latest"}),
    _refused("access_programs", "Leave it out.", {"cyber": "standard"}, ({},)),
    _refused("background_options", "Leave it out.", {"completion_window": "2h"}, ({},)),
    _refused("modalities", "This server writes text only.", ["audio"], (["text"],)),
    _refused("messages", "Name the list 'input'.", []),
    _refused("max_tokens", "Use 'max_output_tokens'.", 5),
    _refused("max_completion_tokens", "Use 'max_output_tokens'.", 5),
    _refused("response_format", "Use 'text.format'.", {"type": "json_object"}),
    _refused("reasoning_effort", "Use 'reasoning.effort'.", "low"),
    _refused("n", "Ask several times.", 2, (1,)),
    refused(
        "context",
        "Leave it out: the chat template says which reasoning of earlier turns the model sees.",
        "current_turn",
        ("auto",),
        Responses.REASONING,
    ),
    refused("mode", "Leave it out.", "pro", ("standard",), Responses.REASONING),
    _noted("phase", "Whether a message was the last of its turn; no template reads it.", "commentary"),
    _noted("end_turn", "Whether a message was the last of its turn; no template reads it.", True),
    _noted("caller", "Who called a function: always the model.", {"type": "direct"}),
    _noted("async", "Whether OpenAI's model waits for the result of a call.", False),
    _noted("created_by", "Names who made an item at OpenAI.", "someone"),
    _noted("internal_chat_message_metadata_passthrough", "Codex's notes about a turn, for OpenAI.", {"turn_id": "a"}),
    _noted("parsed_arguments", "OpenAI's SDK puts them beside `arguments`.", {"a": 1}),
    _noted("provider_specific_fields", "LiteLLM's notes on an earlier item.", {"a": 1}),
    _noted("signature", "Proves to another provider that its model has thought so.", "a"),
    _noted("format", "The form of `signature`.", "a"),
    _noted("annotations", "Notes of an earlier answer about its sources.", [], _PART),
    _noted("logprobs", "Log probabilities of an earlier answer.", [], _PART),
    _noted("parsed", "OpenAI's SDK puts it beside the text that it was made of.", {"a": 1}, _PART),
    _noted("prompt_cache_breakpoint", _CACHED, {"mode": "explicit"}, _PART),
    _noted("cache_control", _CACHED, {"type": "ephemeral"}, _BOTH),
    _noted("index", "Items and parts stand in their order.", 0, _BOTH),
)

RESPONSE_NAMES = ParameterTable(
    {
        Responses.RESPONSE: ResponseBody,
        Responses.ITEM: InputItemBody,
        Responses.PART: InputPartBody,
        Responses.REASONING: ReasoningBody,
        Responses.TEXT: TextBody,
        Responses.TEXT_FORMAT: TextFormatBody,
        Responses.STREAM_OPTIONS: ResponseStreamOptions,
    },
    (*_ROWS, *names_of_clients(Responses.RESPONSE)),
    {Responses.ITEM: OtherTypes(_ITEM_TYPES, read_hosted), Responses.PART: OtherTypes(_PART_TYPES)},
    beside=OPENAI_NAMES,
)


_OF_ALL = frozenset({"type", "id", "status"})
_OF_TYPE = MappingProxyType(
    {
        "message": _OF_ALL | {"role", "content"},
        "function_call": _OF_ALL | {"call_id", "name", "namespace", "arguments"},
        # Codex says of its own tools in which namespace they are.
        "function_call_output": _OF_ALL | {"call_id", "name", "namespace", "output"},
        "reasoning": _OF_ALL | {"content", "summary", "encrypted_content"},
        "item_reference": _OF_ALL,
        "compaction": _OF_ALL | {"encrypted_content"},
        "compaction_trigger": _OF_ALL,
    }
)
# Whatever an item of another type holds, it is refused by its type.
_FOREIGN = MappingProxyType(
    {
        kind: tuple(name for name in InputItemBody.__struct_fields__ if name not in names)
        for kind, names in _OF_TYPE.items()
    }
)


def check_item_fields(items: Sequence[InputItemBody]) -> None:
    """Refuse fields that an item's type does not have; `ApiError` 400 whose `param` is the field with its place."""
    for index, item in enumerate(items):
        kind = item.type or "message"
        for name in _FOREIGN.get(kind, ()):
            if getattr(item, name) is not None:
                raise unknown_parameter(f"input.[{index}].{name}", f" An item of type '{kind}' has no such field.")
        for list_name in ("content", "output", "summary"):
            parts = getattr(item, list_name)
            if isinstance(parts, list):
                _check_parts(parts, f"input.[{index}].{list_name}")


_IMAGE_FIELDS = frozenset({"image_url", "file_id", "detail"})
_FOREIGN_OF_PARTS = MappingProxyType(
    {"refusal": _IMAGE_FIELDS | {"text"}, "input_image": frozenset({"text", "refusal"})}
)


def _check_parts(parts: Sequence[InputPartBody], where: str) -> None:
    for index, part in enumerate(parts):
        for foreign in _FOREIGN_OF_PARTS.get(part.type, _IMAGE_FIELDS | {"refusal"}):
            if getattr(part, foreign) is not None:
                hint = f" A part of type '{part.type[:64]}' has no such field."
                raise unknown_parameter(f"{where}.[{index}].{foreign}", hint)


_FUNCTION, _NAMESPACE = b'"function"', b'"namespace"'
# Which functions are loaded at once, and what they return, is for a search among tools and for programs that call them.
_HARMLESS = frozenset({"defer_loading", "output_schema"})
_CALLERS, _ASYNC = "allowed_callers", "async"
_KNOWN = frozenset(FunctionToolBody.__struct_fields__) | _HARMLESS | {_CALLERS, _ASYNC}

Tools = Sequence[dict[str, Raw]]


class _Tools(Struct):
    tools: list[dict[str, Raw]] | None = None


_decode_body = msgspec.json.Decoder(_Tools).decode
_decode_tools = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode_callers = msgspec.json.Decoder(list[str]).decode


def check_tool_names(body: bytes) -> None:
    """Refuse a name in a function that nothing reads; `ApiError` 400 whose `param` is the name with its place."""
    _check(_decode_body(body).tools or (), "tools")


def _check(tools: Tools, where: str) -> None:
    for index, tool in enumerate(tools):
        kind, place = bytes(tool.get("type", b"")), f"{where}.[{index}]"
        if kind == _FUNCTION:
            _check_function(tool, place)
        elif kind == _NAMESPACE and bytes(inner := tool.get("tools", Raw(b"null"))) != b"null":
            _check(_decode_tools(inner), f"{place}.tools")


def _check_function(tool: dict[str, Raw], place: str) -> None:
    for name, raw in tool.items():
        if bytes(raw) == b"null":
            continue
        if name not in _KNOWN:
            raise unknown_parameter(f"{place}.{name}")
        if name == _ASYNC and bytes(raw) != b"false":
            raise unsupported_parameter(f"{place}.{name}", instead="The model waits for the result of every call.")
        if name == _CALLERS and "direct" not in _callers(raw):
            raise unsupported_parameter(f"{place}.{name}", instead="Only the model itself calls functions: 'direct'.")


def _callers(raw: Raw) -> list[str]:
    try:
        return _decode_callers(raw)
    except msgspec.ValidationError:
        return []


LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# The others are about tools that there are not, so there is nothing that they could include.
_INCLUDABLE = (
    LOGPROBS,
    ENCRYPTED_REASONING,
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)


def check_includes(values: Iterable[str]) -> None:
    """Refuse unknown values of `include`; `ApiError` 400 that names the value."""
    for value in values:
        if value not in _INCLUDABLE:
            raise invalid_value("include", f"'include' has '{value[:64]}'; allowed are {', '.join(_INCLUDABLE)}.")
