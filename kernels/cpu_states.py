"""`StateRows` as the compiled CPU functions take them."""

from __future__ import annotations

from kernels.cpu_structures import StateRowsStructure, address_of
from kernels.state_rows import StateRows


def state_rows_structure(rows: StateRows) -> StateRowsStructure:
    """Return the addresses; `rows` must live as long as they are used."""
    return StateRowsStructure(*map(address_of, rows.tensors), len(rows.slots))
