"""Chooses what multiplies by adapters on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kernels.cpu_library import cpu_library
from kernels.gpu_config import has_kernels
from kernels.low_rank.adapter_rows import AdapterRows
from kernels.low_rank.cpu import CpuAdapterTable
from kernels.low_rank.form import LowRank


def low_rank_reference(
    x: torch.Tensor, result: torch.Tensor, slots: Sequence[int], adapters: Sequence[LowRank | None]
) -> None:
    """Add to each row of `result` what the adapter of its slot makes of `x`, in float32, rounded once.

    Args:
        x: `[num_rows, in_features]`, inputs of the matrix.
        result: `[num_rows, out_features]`, its products.
        slots: Of each row; below zero without an adapter.
        adapters: By slot; None leaves the matrix as it is.
    """
    for slot in sorted({slot for slot in slots if slot >= 0}):
        adapter = adapters[slot]
        if adapter is None:
            continue
        rows = torch.tensor([row for row, own in enumerate(slots) if own == slot], device=x.device)
        added = result[rows].float()
        for part in adapter.parts:
            product = x[rows].float() @ part.down.float().T * part.scale
            added[:, part.features] += product @ part.up.float().T
        result[rows] = added.to(result.dtype)


class AdapterTable(Protocol):
    """The parts of all adapters beside one matrix, by slot."""

    def pack(self, adapter: LowRank) -> Any:
        """Lay an adapter's part out as it is read; any thread may do so."""

    def place(self, slot: int, packed: Any) -> None:
        """Put what `pack` made into a slot that no step reads; None clears the slot."""

    def add(self, x: torch.Tensor, result: torch.Tensor, rows: AdapterRows) -> None:
        """Add to `result`, `[num_rows, out_features]`, what each row's adapter makes of `x`, `[num_rows, in_features]`.

        Rows without an adapter are not touched.
        """


class _ReferenceTable:
    """By plain torch."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._adapters: list[LowRank | None] = [None] * num_slots
        self._device = device

    def pack(self, adapter: LowRank) -> LowRank:
        return adapter.to(self._device)

    def place(self, slot: int, packed: LowRank | None) -> None:
        self._adapters[slot] = packed

    def add(self, x: torch.Tensor, result: torch.Tensor, rows: AdapterRows) -> None:
        low_rank_reference(x, result, rows.slots.tolist(), self._adapters)


def make_adapter_table(num_slots: int, device: torch.device, dtype: torch.dtype) -> AdapterTable:
    """Make the table of a matrix on a device, whose inputs are of type `dtype`."""
    if device.type == "cpu" and (library := cpu_library()) is not None:
        return CpuAdapterTable(library, num_slots, dtype)
    if has_kernels(device):
        from kernels.low_rank.triton_kernel import GpuAdapterTable

        return GpuAdapterTable(num_slots, device, dtype)
    return _ReferenceTable(num_slots, device)
