"""Which objects of a request are looked into; that strange fields are refused is in `test_messages.py`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec import Struct

from shared.messages import Request
from shared.request_fields import _OBJECTS, UnknownFieldError, check_fields


def objects_of(struct: type[Struct]) -> Iterator[tuple[str, type[Struct]]]:
    """Yield the fields below a message that hold an object or several, and what these are."""
    for field in msgspec.structs.fields(struct):
        for inner in structs_in(msgspec.inspect.type_info(field.type)):
            yield field.encode_name, inner
            yield from objects_of(inner)


def structs_in(kind: object) -> Iterator[type[Struct]]:
    if isinstance(kind, msgspec.inspect.StructType):
        yield kind.cls
    elif isinstance(kind, msgspec.inspect.Metadata):
        yield from structs_in(kind.type)
    elif isinstance(kind, msgspec.inspect.UnionType):
        for each in kind.types:
            yield from structs_in(each)
    elif isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        yield from structs_in(kind.item_type)


def test_every_object_below_a_request_is_looked_into() -> None:
    assert dict(objects_of(Request)) == dict(_OBJECTS)


def test_tag_of_a_message_is_a_field_of_the_message_alone() -> None:
    check_fields({"type": "request", "sampling": {"seed": 1}}, Request)
    with pytest.raises(UnknownFieldError, match="sampling has no field 'type'"):
        check_fields({"type": "request", "sampling": {"type": "request"}}, Request)
