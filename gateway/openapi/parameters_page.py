"""The page `ops/docs/parameters.md`: what bodies say of themselves. `python -m gateway.openapi.parameters_page`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

from gateway.api.schemas.names import Kind, ParameterTable, Row, Use
from gateway.openapi.document import TABLES

_OPENING = """# Parameters

Each name in a body is **served**, **ignored** because it changes nothing here, or **refused** with a 400 that names it
and says what to do. A name that is not on this page is refused too, with the nearest name that is served, unless the
gateway runs with `--allow-unknown-parameters` (`HEADRACE_ALLOW_UNKNOWN_PARAMETERS`). Null always means: left out. A
whole number may be written as 256 or 256.0. Half of a surrogate pair in a text is read as U+FFFD.

`max_tokens` is a limit, not a demand: an answer that the context ends earlier has the finish reason `length`, and
beside it `"stop_reason": "model_context_window_exceeded"`, which Anthropic's format has as its own reason. A prompt
that leaves no room for a token is refused with the code `context_length_exceeded`. An empty prompt is the token that
begins every text. Bodies are JSON in UTF-8, compressed by gzip (`Content-Encoding: gzip`) or not at all; what limits
the size of a body limits what it unpacks to.

`temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` that a body leaves out are those that the model's
`generation_config.json` advises, if it does; or else 1, 1, 0, 0 and 1.

Errors are described in [errors.md](errors.md).
"""
_ENDING = "This page is made of what the bodies say of themselves: `python -m gateway.openapi.parameters_page`.\n"


def parameters_page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([_OPENING, *(_section(table, kind) for table in TABLES for kind in table.readers), _ENDING])


def _section(table: ParameterTable, kind: Kind) -> str:
    rows = table.rows(kind).values()
    parts = [f"## {kind.value}\n"]
    for use, heading in ((Use.SERVED, "What it does"), (Use.IGNORED, "Why it changes nothing")):
        chosen = _sorted(rows, use)
        if chosen:
            lines = [f"| `{row.name}` | {row.note} |" for row in chosen]
            parts.append("\n".join([f"| {use.value} | {heading} |", "|---|---|", *lines, ""]))
    refused = _sorted(rows, Use.REFUSED)
    if refused:
        lines = [f"| `{row.name}` | {row.note} | {_values(row)} |" for row in refused]
        parts.append("\n".join(["| refused | What to do | Passes as |", "|---|---|---|", *lines, ""]))
    return "\n".join(parts)


def _sorted(rows: Iterable[Row], use: Use) -> list[Row]:
    return sorted((row for row in rows if row.use is use), key=lambda row: row.name)


def _values(row: Row) -> str:
    return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in row.without_effect)


if __name__ == "__main__":
    sys.stdout.write(parameters_page())
