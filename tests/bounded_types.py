"""Values at, just inside and outside the bounds of a message's fields, found from the types alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

TINY = 5e-324
NOT_NUMBERS = (math.nan, math.inf, -math.inf)

Number = inspect.IntType | inspect.FloatType
Collection = inspect.ListType | inspect.VarTupleType | inspect.DictType


@dataclass(frozen=True)
class Leaf:
    """A number, text or collection within a message.

    Attributes:
        path: Names of fields; `*` stands for the entries of a collection, `keys` for the keys of a dictionary.
    """

    path: tuple[str, ...]
    type: inspect.Type


def leaves(struct: type[msgspec.Struct]) -> list[Leaf]:
    """Return everything in a message that has a size or a value, however deep."""
    return [leaf for field in _fields(struct) for leaf in _leaves((field.encode_name,), field.type)]


def _fields(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType)
    return described.fields


def _leaves(path: tuple[str, ...], described: inspect.Type) -> Iterator[Leaf]:
    if isinstance(described, inspect.Metadata):
        described = described.type
    if isinstance(described, inspect.UnionType):
        for part in described.types:
            yield from _leaves(path, part)
    elif isinstance(described, inspect.StructType):
        for field in described.fields:
            yield from _leaves((*path, field.encode_name), field.type)
    elif isinstance(described, inspect.ListType | inspect.VarTupleType):
        yield Leaf(path, described)
        yield from _leaves((*path, "*"), described.item_type)
    elif isinstance(described, inspect.DictType):
        yield Leaf(path, described)
        yield from _leaves((*path, "keys"), described.key_type)
        yield from _leaves((*path, "*"), described.value_type)
    elif isinstance(described, Number | inspect.StrType):
        yield Leaf(path, described)


def legal_numbers(described: Number) -> list[Any]:
    """Return both bounds and, where they are allowed, 0, 1 and the smallest number above 0."""
    least, most = described.ge, described.le
    assert least is not None
    assert most is not None
    kind = int if isinstance(described, inspect.IntType) else float
    inside = [value for value in (0, 1, TINY) if least <= value <= most and (kind is float or value != TINY)]
    return list(dict.fromkeys(map(kind, [least, most, *inside])))


def illegal_numbers(described: Number) -> list[Any]:
    """Return what is just outside the bounds, far outside, no number, or of another type."""
    least, most = described.ge, described.le
    assert least is not None
    assert most is not None
    wrong: list[Any] = ["1", [1], {"a": 1}, True]
    if isinstance(described, inspect.IntType):
        outside = [least - 1, most + 1, -1, 0, 2**63, -(2**63) - 1, 2**64, 10**30]
        return [*(value for value in outside if not least <= value <= most), 1.5, *NOT_NUMBERS, *wrong]
    outside = [math.nextafter(least, -math.inf), math.nextafter(most, math.inf), -1.0, 0.0, 2.0**63, -1e308, 1e308]
    return [*(value for value in outside if not least <= value <= most), *NOT_NUMBERS, *wrong]
