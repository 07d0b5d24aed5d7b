"""A step's layout on the device: what the model's input is gathered from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.execution.batch.layout import Int32s, Int64s, StepLayout
from gpu_worker.execution.batch.transfers import Upload


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The arrays of a `StepLayout`."""

    max_query_len: int
    token_ids: torch.Tensor
    token_rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    tree_masks: torch.Tensor | None = None


class StagedStep:
    """A layout on its way to the device. Layouts of equal size have their tensors at equal places of an upload."""

    def __init__(self, layout: StepLayout, upload: Upload) -> None:
        """Add the arrays to the upload."""
        arrays: list[Int32s | Int64s] = [
            layout.token_ids,
            layout.token_rows,
            layout.positions,
            layout.slots,
            layout.rows,
            layout.query_starts,
            layout.context_lens,
        ]
        if layout.tree_masks is not None:
            arrays.append(layout.tree_masks)
        self._staged = [upload.add(array) for array in arrays]
        self._max_query_len = layout.max_query_len

    @property
    def tensors(self) -> StepTensors:
        """Return the tensors of an upload that was sent or bound."""
        return StepTensors(self._max_query_len, *(staged.tensor for staged in self._staged))
