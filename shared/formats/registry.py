"""All formats by name, and which of them a chat template speaks."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.families.plain import PLAIN

_FORMATS = {each.name: each for each in (PLAIN,)}


def format_names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return tuple(_FORMATS)


def format_named(name: str) -> ChatFormat:
    """Return a format by its name; the plain one for a name that is empty or unknown."""
    return _FORMATS.get(name, PLAIN)


def detect_format(template: str | None) -> str:
    """Return the name of the format that a chat template speaks, by the markers in its text."""
    return PLAIN.name
