"""What a field of a body says of itself in its annotation, and the rows of served parameters that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from msgspec import Meta, Struct

from gateway.api.schemas.row import Kind, Row

_EXAMPLE = "example"


def described(note: str, example: object = None) -> Meta:
    """Return the description of a field, which stands behind the type in its `Annotated`.

    Args:
        note: What the parameter does.
        example: A value that a client would send; the tests send it. None for what every body has.
    """
    return Meta(description=note, extra={_EXAMPLE: example})


def rows_of(
    struct: type[Struct], kind: Kind, kinds: Mapping[type[Struct], Kind] = MappingProxyType({})
) -> tuple[Row, ...]:
    """Return a row for each field of a struct.

    Args:
        struct: Whose fields are served.
        kind: The object that it reads.
        kinds: The objects that other structs read, which may stand in its fields.

    Raises:
        TypeError: A field is not described.
    """
    annotations = get_type_hints(struct, include_extras=True)
    return tuple(_row(struct, name, annotations[name], kind, kinds) for name in struct.__struct_fields__)


def _row(struct: type[Struct], name: str, annotation: Any, kind: Kind, kinds: Mapping[type[Struct], Kind]) -> Row:
    for meta in getattr(annotation, "__metadata__", ()):
        if isinstance(meta, Meta) and meta.description is not None:
            example = (meta.extra or {}).get(_EXAMPLE)
            return Row(name, (kind,), meta.description, example, holds=_held(annotation, kinds))
    message = f"{struct.__name__}.{name} says nothing of itself. Annotate it with 'described(...)'."
    raise TypeError(message)


def _held(annotation: Any, kinds: Mapping[type[Struct], Kind]) -> Kind | None:
    """Return the kind of the objects that a value of this type is or holds."""
    if isinstance(annotation, type) and annotation in kinds:
        return kinds[annotation]
    return next((held for part in get_args(annotation) if (held := _held(part, kinds)) is not None), None)
