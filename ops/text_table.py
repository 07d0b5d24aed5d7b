"""Tables as commands print them: columns as wide as their widest cell, two spaces between."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_MAX_CELL = 60


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line for each row; all rows have as many cells."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def printable_cell(text: str, limit: int | None = _MAX_CELL) -> str:
    """Shorten a text that has more than `limit` characters, and escape what could move a terminal's cursor."""
    short = text if limit is None or len(text) <= limit else text[: limit - 1] + "…"
    return short if short.isprintable() else json.dumps(short)[1:-1]


def print_rows(
    rows: Sequence[dict[str, Any]],
    heads: Sequence[str],
    cells: Callable[[dict[str, Any]], Sequence[str]],
    nothing: str = "",
    *,
    is_json: bool,
) -> None:
    """Print rows as a table, or as one JSON object a line; where there is none, say so on standard error."""
    if not rows and nothing and not is_json:
        print(nothing, file=sys.stderr)
        return
    for line in map(json.dumps, rows) if is_json else aligned([heads, *map(cells, rows)]):
        print(line)
