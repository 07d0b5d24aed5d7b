"""Tables of characters: which are refused, and that none that is taken ends the reader."""

from __future__ import annotations

import random
import struct

import pytest
from tokenizers import normalizers

from gpu_worker.text.gguf_encoder_tokenizers import problem_of_table

_UNITS = 256
_VALUE, _HAS_VALUE = 1 << 31, 1 << 8


def table(texts: bytes = b"a\0", **changed: int) -> bytes:
    """A table that replaces `A`: its root leads to unit 65, and that to its value at unit 1."""
    units = [0] * _UNITS
    units[ord("A")] = ord("A") | _HAS_VALUE | (ord("A") ^ 1) << 10
    units[1] = _VALUE
    for place, unit in changed.items():
        units[int(place[1:])] = unit
    return struct.pack(f"<I{_UNITS}I", 4 * _UNITS, *units) + texts


def test_whole_table_is_taken_and_replaces() -> None:
    assert problem_of_table(table()) is None
    assert normalizers.Precompiled(table()).normalize_str("ABA") == "aBa"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "begins with an array of 0 bytes, and has 0"),
        (b"\0\0\0\0abc", "begins with an array of 0 bytes"),
        (b"\7\0\0\0" + bytes(7), "begins with an array of 7 bytes"),
        (table()[:100], "begins with an array of 1024 bytes, and has 96"),
        (table(b"\xff\0"), "not UTF-8"),
        (table(u0=1 << 20), "leads beyond its end"),
        (table(u1=_VALUE | 3), "names replacements beyond its end"),
        (table(b"\xc3\xa9\0", u1=_VALUE | 1), "within a character"),
    ],
)
def test_table_that_would_end_its_reader_is_refused(content: bytes, problem: str) -> None:
    assert problem in (problem_of_table(content) or "")


def test_what_is_taken_can_be_read_whatever_the_text() -> None:
    chance = random.Random(20261123)
    text = "".join(map(chr, range(1, 0x800)))
    num_taken = 0
    for _ in range(300):
        places = {
            f"u{chance.randrange(_UNITS)}": chance.choice([chance.randrange(1 << 18), _VALUE | chance.randrange(4)])
            for _ in range(chance.randint(1, 4))
        }
        content = table("aé\0".encode(), **places)
        if problem_of_table(content) is None:
            num_taken += 1
            normalizers.Precompiled(content).normalize_str(text)
    assert num_taken > 30
