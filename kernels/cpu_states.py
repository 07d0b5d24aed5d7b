"""`StateRows` as the compiled CPU functions take them."""

from __future__ import annotations

import torch

from kernels.cpu_structures import StateRowsStructure
from kernels.state_rows import StateRows


def state_rows_structure(rows: StateRows) -> StateRowsStructure:
    """Return the addresses; `rows` must live as long as they are used."""
    return StateRowsStructure(
        rows.slots.data_ptr(),
        rows.query_starts.data_ptr(),
        rows.context_lens.data_ptr(),
        _address(rows.num_kept),
        *map(_address, rows.save_tensors),
        len(rows.slots),
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
