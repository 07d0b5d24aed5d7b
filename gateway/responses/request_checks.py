"""What a request may name: the fields of an item by its type, the names in functions, and what `include` asks for.

A field of another type would be left out in silence, and a misspelt name would leave a function without its parameters.
Tools that OpenAI runs itself have names of their own, and are refused by their type, so that only functions are read.
Names that no item has are refused where the body is decoded, by the table of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

import msgspec
from msgspec import Raw, Struct

from gateway.api.schemas.checks import invalid_value, unknown_parameter, unsupported_parameter
from gateway.responses.body import InputItemBody, InputPartBody
from gateway.responses.tools import FunctionToolBody

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
    """Refuse fields that the type of an item does not have.

    Raises:
        ApiError: 400; `param` is the field with its place.
    """
    for index, item in enumerate(items):
        kind = item.type or "message"
        for name in _FOREIGN.get(kind, ()):
            if getattr(item, name) is not None:
                raise unknown_parameter(f"input.[{index}].{name}", f" An item of type '{kind}' has no such field.")
        for list_name in ("content", "output", "summary"):
            parts = getattr(item, list_name)
            if isinstance(parts, list):
                _check_parts(parts, f"input.[{index}].{list_name}")


def _check_parts(parts: Sequence[InputPartBody], where: str) -> None:
    for index, part in enumerate(parts):
        foreign = "text" if part.type == "refusal" else "refusal"
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
    """Refuse a name in a function that nothing reads; `body` was read as a request before.

    Raises:
        ApiError: 400; `param` is the name with its place.
    """
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
    """Refuse what nothing is known of.

    Raises:
        ApiError: 400; it names the value.
    """
    for value in values:
        if value not in _INCLUDABLE:
            raise invalid_value("include", f"'include' has '{value[:64]}'; allowed are {', '.join(_INCLUDABLE)}.")
