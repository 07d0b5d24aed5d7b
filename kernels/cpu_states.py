"""`StateRows` as the compiled CPU functions take them."""

from __future__ import annotations

from kernels.cpu_structures import StateRowsStructure, address_of
from kernels.state_rows import StateRows


def state_rows_structure(rows: StateRows) -> StateRowsStructure:
    """Return the addresses; `rows` must live as long as they are used."""
    return StateRowsStructure(
        rows.slots.data_ptr(),
        rows.query_starts.data_ptr(),
        rows.context_lens.data_ptr(),
        address_of(rows.num_kept),
        *map(address_of, rows.save_tensors),
        len(rows.slots),
    )
