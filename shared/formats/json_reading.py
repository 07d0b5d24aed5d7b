"""Reads JSON from text that arrives in pieces, and hands it on as it comes.

What models write is nearly JSON: line breaks in strings are escaped, and a close marker outside of a string ends the
value, whatever is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from shared.formats.text_source import Markers, Reading, TextSource, markers

Sink = Callable[[str], None]

_IN_STRING = markers('"', "\\")
_BEHIND_SCALAR = markers(",", "}", "]", " ", "\n", "\r", "\t")
_CONTROL = re.compile(r"[\x00-\x1f]")
_HALF = re.compile("[\ud800-\udfff]")


def escaped(text: str) -> str:
    """Return text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def with_halves_escaped(text: str) -> str:
    """Return JSON text that was the value of a string, with escapes for halves of surrogate pairs: none can be sent."""
    return _HALF.sub(lambda half: f"\\u{ord(half.group()):04x}", text)


def parsed(text: str) -> Any:
    """Return the value of a JSON text; `ValueError` if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_value(source: TextSource, sink: Sink, closes: Markers) -> Reading[bool]:
    """Read a JSON value and hand it on; return True if it was complete."""
    first = yield from source.peek()
    if first == '"':
        sink(source.take(source.at + 1))
        return (yield from _read_string(source, sink))
    if first not in ("{", "["):
        while True:
            text, behind = yield from source.until(_BEHIND_SCALAR)
            sink(text)
            if behind or source.has_ended:
                return bool(behind)
    return (yield from _read_nested(source, sink, closes))


def read_string(source: TextSource, max_length: int) -> Reading[str | None]:
    """Read a short JSON string and return its value; None if there is none or it is longer."""
    if not (yield from source.accept('"')):
        return None
    raw: list[str] = []
    length = 0
    while length <= max_length:
        text, found = yield from source.until(_IN_STRING, max_length + 1 - length)
        raw.append(text)
        length += len(text)
        if not found or length > max_length:
            if source.has_ended:
                return None
            continue
        source.take(source.at + 1)
        if found == '"':
            try:
                return str(json.loads(f'"{"".join(raw)}"'))
            except ValueError:
                return None
        yield from source.peek()
        raw.append(found + source.take(source.at + 1))
        length += 1
    return None


def _read_nested(source: TextSource, sink: Sink, closes: Markers) -> Reading[bool]:
    sought = markers("{", "}", "[", "]", '"', *closes.texts)
    depth = 0
    while True:
        text, found = yield from source.until(sought)
        sink(text)
        if not found:
            if source.has_ended:
                return False
            continue
        if found in closes.texts:
            return False
        sink(source.take(source.at + 1))
        if found == '"':
            yield from _read_string(source, sink)
        else:
            depth += 1 if found in ("{", "[") else -1
            if not depth:
                return True


def _read_string(source: TextSource, sink: Sink) -> Reading[bool]:
    while True:
        text, found = yield from source.until(_IN_STRING)
        sink(_CONTROL.sub(_escape_control, text))
        if not found:
            if source.has_ended:
                return False
            continue
        source.take(source.at + 1)
        if found == '"':
            sink(found)
            return True
        yield from source.peek()
        sink(found + source.take(source.at + 1))


def _escape_control(match: re.Match[str]) -> str:
    return escaped(match.group())


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")
