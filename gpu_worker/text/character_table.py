"""SentencePiece's compiled table of characters, checked before it is read.

The `tokenizers` package reads the table without looking whether its numbers lead beyond its end: such a table ends the
thread that loads it, or later each one that reads a text.

Source: darts-clone, whose double array it is: a unit holds a label, the distance to its children and whether a value
stands among them. A unit with the highest bit set is a value: where in the texts behind the array a replacement begins.
"""

from __future__ import annotations

import numpy as np

_VALUE = 1 << 31
_HAS_VALUE = 1 << 8
_IS_FAR = 1 << 9
# Children of a unit are found by their byte, so that all of a block may be looked at.
_BLOCK = 256


def problem_of_table(table: bytes) -> str | None:
    """Return what is wrong with a table; None if whatever text is read by it ends well."""
    num_bytes = int.from_bytes(table[:4], "little")
    if not num_bytes or num_bytes % 4 or 4 + num_bytes > len(table):
        return f"begins with an array of {num_bytes} bytes, and has {max(0, len(table) - 4)}"
    texts = np.frombuffer(table[4 + num_bytes :], np.uint8)
    try:
        texts.tobytes().decode()
    except UnicodeDecodeError:
        return "holds replacements that are not UTF-8"
    units = np.frombuffer(table[4 : 4 + num_bytes], "<u4").astype(np.int64)
    places = np.arange(len(units))
    shift = np.where(units & _IS_FAR, 8, 0)
    children = places ^ ((units >> 10) << shift)
    is_node = units & _VALUE == 0
    is_node[0] = True
    if (children[is_node] | (_BLOCK - 1)).max() >= len(units):
        return "leads beyond its end"
    values = units[children[is_node & (units & _HAS_VALUE != 0)]] & (_VALUE - 1)
    if values.size and values.max() >= len(texts):
        return "names replacements beyond its end"
    if (texts[values] & 0xC0 == 0x80).any():
        return "names replacements within a character"
    return None
