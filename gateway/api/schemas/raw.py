"""JSON that a body's struct keeps undecoded, and its value where the field was left out."""

from __future__ import annotations

from msgspec import Raw

NULL = Raw(b"null")


def null() -> Raw:
    """Return what stands for a field that was left out. As a factory: the schema of a body cannot tell a Raw."""
    return NULL
