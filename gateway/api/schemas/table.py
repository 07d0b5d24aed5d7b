"""What becomes of each name that a client may write: served, ignored because it changes nothing here, or refused.

The fields of the structs in this folder say themselves what they do: from them come the rows of `served.py`. What of
OpenAI's first endpoints is not served stands in `ignored.py`, `refused.py` and `other_servers.py`. What becomes of the
names of other endpoints, whose structs stand in other rooms, stands in files like `response_names.py`. From all rows
come the decoding of bodies, the page `ops/docs/parameters.md` and the tests. A name that is in no row is refused too,
unless its value is null.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from types import MappingProxyType

from gateway.api.schemas.anthropic_names import ANTHROPIC_NAMES, BLOCK_TYPES
from gateway.api.schemas.ignored import IGNORED
from gateway.api.schemas.item_names import ITEM_NAMES, ITEM_TYPES, PART_TYPES
from gateway.api.schemas.other_servers import OF_OTHER_SERVERS
from gateway.api.schemas.pooling_names import POOLING_NAMES
from gateway.api.schemas.refused import REFUSED
from gateway.api.schemas.response_names import RESPONSE_NAMES
from gateway.api.schemas.row import Kind, Row, Use
from gateway.api.schemas.served import SERVED

# A longer name is nobody's typing error, and comparing it would cost time.
_MAX_COMPARED_CHARACTERS = 64
# Less likeness than this is chance: `input` is no `min_p`, and `store` no `stream`.
_MIN_LIKENESS = 0.75
_LET_PASS = " Leave it out, or let the operator's `--allow-unknown-parameters` leave out all such names."
# Names of one thing: an endpoint that has one of them says so to whoever writes another.
_SAME = (
    ("model", "model_name", "model_id", "engine", "deployment"),
    ("prompt", "input", "inputs", "text", "texts", "content"),
    ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens", "max_length", "num_predict"),
    ("system", "instructions", "system_prompt"),
)


class ParameterTable:
    """All rows, found by the object they stand in and by name."""

    def __init__(self, rows: Iterable[Row]) -> None:
        """Keep these rows.

        Raises:
            ValueError: Two rows are about the same name of the same object.
        """
        self._rows: dict[Kind, dict[str, Row]] = {kind: {} for kind in Kind}
        for row in rows:
            for kind in row.kinds:
                if row.name in self._rows[kind]:
                    raise ValueError(f"Two rows are about '{row.name}' of {kind.value}.")
                self._rows[kind][row.name] = row

    def rows(self, kind: Kind) -> dict[str, Row]:
        """Return the rows of one object by name."""
        return self._rows[kind]

    def hint(self, kind: Kind, name: str) -> str:
        """Return a sentence about an unknown name: which one may be meant, or where it belongs; may be empty."""
        if len(name) > _MAX_COMPARED_CHARACTERS:
            return ""
        served = [row.name for row in self._rows[kind].values() if row.use is Use.SERVED]
        meant = [known for same in _SAME if name in same for known in same if known in served]
        if meant:
            return f" Did you mean '{meant[0]}'?"
        if not kind.value.startswith("POST"):
            return _nearest(name, served)
        # Another endpoint's name is no misspelling.
        for other, rows in self._rows.items():
            row = rows.get(name)
            if row is not None and row.use is Use.SERVED and other.value.startswith("POST"):
                return f" It belongs to {other.value}."
        return _nearest(name, served) or _LET_PASS


def _nearest(name: str, served: list[str]) -> str:
    spelled = {_letters(known): known for known in served}
    near = difflib.get_close_matches(_letters(name), spelled, n=1, cutoff=_MIN_LIKENESS)
    return f" Did you mean '{spelled[near[0]]}'?" if near else ""


def _letters(name: str) -> str:
    """Return a name as it is in any spelling: `maxTokens` is `max_tokens`."""
    return name.replace("_", "").lower()


PARAMETERS = ParameterTable(
    (*SERVED, *IGNORED, *REFUSED, *OF_OTHER_SERVERS, *ANTHROPIC_NAMES, *RESPONSE_NAMES, *ITEM_NAMES, *POOLING_NAMES)
)

# Objects of other types are refused by their type, and not by a name that they alone have.
SERVED_TYPES = MappingProxyType(
    {Kind.RESPONSE_ITEM: ITEM_TYPES, Kind.RESPONSE_PART: PART_TYPES, Kind.BLOCK: BLOCK_TYPES}
)
