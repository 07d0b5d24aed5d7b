"""The names in the functions that a request offers: a misspelt one would leave a function without its parameters.

Tools that OpenAI runs itself have names of their own, and are refused by their type, so that only functions are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from gateway.api.schemas.refusals import unknown_parameter, unsupported_parameter
from gateway.responses.tools import FunctionToolBody

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
