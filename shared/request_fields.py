"""Whether a request that people write by hand names only fields that somebody reads.

Between the parts of a fleet, which speak msgpack, unknown fields are ignored, so that versions may mix. What is written
as JSON comes from a person or a person's program: a misspelt field would change the answer without a word, so it is
refused with the nearest name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from shared.cache_hints import CacheHints
from shared.conversation import ChatMessage, ChatOptions, ToolCall
from shared.disaggregation import KvReady
from shared.grammar import Grammar
from shared.kv_budget import EvictedBlocks, KvBudget
from shared.media import ContentImage, MediaRef
from shared.pooling import Pooling
from shared.sampling import Sampling

# Fields that hold objects, or lists of them.
_OBJECTS: Mapping[str, type[Struct]] = MappingProxyType(
    {
        "sampling": Sampling,
        "grammar": Grammar,
        "messages": ChatMessage,
        "tool_calls": ToolCall,
        "chat": ChatOptions,
        "images": ContentImage,
        "media": MediaRef,
        "pooling": Pooling,
        "cache_hints": CacheHints,
        "kv_budget": KvBudget,
        "evicted": EvictedBlocks,
        "ready": KvReady,
    }
)
# What other interfaces call it: OpenAI's completions, and the lines of its Batch API.
_MEANT = MappingProxyType({"prompt": "text", "input": "text", "custom_id": "id", "body": "messages"})
# The tag by which messages are told apart.
_TAG = "type"


class UnknownFieldError(ValueError):
    """A request has a field that nothing reads.

    Attributes:
        param: The field.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def check_fields(fields: Mapping[str, Any], struct: type[Struct], place: str = "") -> None:
    """Refuse a field that `struct`, or an object within it, does not have.

    Args:
        fields: Decoded JSON, of the right types or not.
        struct: What is read of it.
        place: Name of the field that holds the object; empty for the request itself.

    Raises:
        UnknownFieldError: There is one.
    """
    known = struct.__struct_fields__
    for name, value in fields.items():
        if name not in known:
            if not place and name == _TAG:
                continue
            raise UnknownFieldError(_message(name, known, place), name[:64])
        if (inner := _OBJECTS.get(name)) is not None:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    check_fields(each, inner, name)


def _message(name: str, known: tuple[str, ...], place: str) -> str:
    if not place and name in Sampling.__struct_fields__:
        return f'{name!r} belongs into "sampling": {{"{name}": ...}}'
    # Of a name of megabytes the search alone would take a second.
    close = next(iter(difflib.get_close_matches(name[:64], known, 1)), None)
    meant = close if place else _MEANT.get(name, close)
    hint = "" if meant is None else f"; did you mean {meant!r}?"
    return f"{place or 'the request'} has no field {name[:64]!r}{hint}"
