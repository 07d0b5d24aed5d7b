"""JSON that a body's struct keeps undecoded, in fields that are `UNSET` where they were left out."""

from __future__ import annotations

from msgspec import Raw, UnsetType

_NULL = b"null"


def given(value: Raw | UnsetType) -> Raw | None:
    """Return the JSON of a field, or None where it was left out or is null."""
    return None if isinstance(value, UnsetType) or bytes(value) == _NULL else value
