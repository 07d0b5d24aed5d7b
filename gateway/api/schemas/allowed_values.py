"""The values that a type allows at a place within it, which msgspec does not tell of those that it refuses."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator

import msgspec

_INDEX = re.compile(r"\[\d+\]")


def allowed_values(body: object, place: str) -> list[str]:
    """Return the texts of which one must stand at a place such as `messages.[0].role`."""
    parts = [part for part in place.split(".") if not _INDEX.fullmatch(part)]
    return list(dict.fromkeys(_values(body, parts)))


def _values(found: object, parts: list[str]) -> Iterator[str]:
    # Only the types on the way are looked at: `msgspec.inspect` reads all that a body may hold, in some 10 ms.
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        for field in msgspec.structs.fields(found) if parts else ():
            if field.encode_name == parts[0]:
                yield from _values(field.type, parts[1:])
    elif typing.get_origin(found) is typing.Literal:
        yield from () if parts else map(str, typing.get_args(found))
    else:
        for inner in typing.get_args(found):
            yield from _values(inner, parts)
