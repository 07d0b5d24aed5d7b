"""Checks that a request written by hand names only known fields.

Between the parts of a fleet, which speak msgpack, unknown fields are ignored, so that versions may mix. JSON comes
from a person or a person's program: a misspelt field would silently change the answer, so it is refused with the
nearest name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from msgspec import Struct

from shared.sampling import Sampling

# What other interfaces call it: OpenAI's completions, and the lines of its Batch API.
_MEANT = MappingProxyType({"prompt": "text", "input": "text", "custom_id": "id", "body": "messages"})
# The tag that names the type of a message.
_TAG = "type"


class UnknownFieldError(ValueError):
    """A request has a field, `param`, that nothing reads."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def check_fields(fields: Mapping[str, Any], struct: type[Struct], place: str = "") -> None:
    """Refuse a field that `struct`, or an object within it, does not have.

    `fields` are decoded JSON, of the right types or not; `place` is the field that holds the object, empty for the
    request itself.

    Raises:
        UnknownFieldError: There is one.
    """
    known, objects = struct.__struct_fields__, _objects(struct)
    for name, value in fields.items():
        if name not in known:
            if not place and name == _TAG:
                continue
            raise UnknownFieldError(_message(name, known, place), name[:64])
        if (inner := objects.get(name)) is not None:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    check_fields(each, inner, name)


@cache
def _objects(struct: type[Struct]) -> dict[str, type[Struct]]:
    """Return the fields that hold objects, or lists of them."""
    found = {}
    for name, hint in get_type_hints(struct).items():
        waiting = [hint]
        while waiting:
            each = waiting.pop()
            waiting += get_args(each)
            if isinstance(each, type) and issubclass(each, Struct):
                found[name] = each
    return found


def _message(name: str, known: tuple[str, ...], place: str) -> str:
    if not place and name in Sampling.__struct_fields__:
        return f'{name!r} belongs into "sampling": {{"{name}": ...}}'
    # Of a name of megabytes the search alone would take a second.
    close = next(iter(difflib.get_close_matches(name[:64], known, 1)), None)
    meant = close if place else _MEANT.get(name, close)
    hint = "" if meant is None else f"; did you mean {meant!r}?"
    return f"{place or 'the request'} has no field {name[:64]!r}{hint}"
