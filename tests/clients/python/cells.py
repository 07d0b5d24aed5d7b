"""Runs the features of one client and prints a line of JSON for each: its name, and why it does not work, if so."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import struct
import sys
import traceback
import zlib
from collections.abc import Callable
from typing import NamedTuple

URL = os.environ["HEADRACE_URL"]
KEY = os.environ["HEADRACE_KEY"]
MODEL = os.environ["HEADRACE_MODEL"]


class Place(NamedTuple):
    """A system that some clients alone are given."""

    url: str
    key: str
    model: str


def _place(name: str) -> Place:
    return Place(*(os.environ.get(f"HEADRACE_{name}_{each}", "") for each in ("URL", "KEY", "MODEL")))


# The model of the first thinks, that of the second calls the tool `nobody` whatever it is asked, the third sees.
THINKING, CALLING, SEEING = _place("THINKING"), _place("CALLING"), _place("SEEING")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# A record of two numbers, by names that are given.
POINT = {
    "type": "object",
    "propertyNames": {"enum": ["x", "y"]},
    "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
}
# A model that has learned nothing of tools is made to call one by the grammar; this many turns are an agent's day.
NUM_TURNS = 20


def picture() -> bytes:
    """Return a PNG of 32 times 24 pixels, which that model reads as 12 tokens."""
    lines = b"".join(b"\0" + bytes(range(line, line + 96)) for line in range(24))

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 32, 24, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


PICTURE = base64.b64encode(picture()).decode()
PICTURE_URL = f"data:image/png;base64,{PICTURE}"
# The picture, the letters of `Look`, and what the template adds.
NUM_OF_PICTURE = 12
NUM_SEEN = NUM_OF_PICTURE + 5


def check_person(value: object) -> None:
    """Assert that a value is what `SCHEMA` describes."""
    assert isinstance(value, dict), value
    assert set(value) == {"name", "age"}, value
    assert isinstance(value["name"], str), value
    assert 0 <= value["age"] <= 120, value


def run(cells: dict[str, Callable[[], None]]) -> None:
    """Try each feature, and say how it went."""
    told = sys.stdout
    # Some libraries write there too, from threads of their own.
    with contextlib.redirect_stdout(sys.stderr):
        for feature, attempt in cells.items():
            print(json.dumps({"feature": feature, "why": _problem(attempt)}), file=told, flush=True)


def _problem(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return f"{type(error).__name__}: {error}"[:500]
    return ""
