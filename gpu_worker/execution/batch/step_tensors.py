"""A step's layout on the device: what the model's input is gathered from."""

from __future__ import annotations

import msgspec
import torch
from msgspec import Struct

from gpu_worker.execution.batch.layout import StepLayout
from gpu_worker.execution.batch.transfers import Upload
from kernels.state_rows import StateRows


class StepTensors(Struct, frozen=True, gc=False):
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
    num_kept: torch.Tensor | None = None
    window_slots: tuple[torch.Tensor, ...] = ()

    @property
    def state_rows(self) -> StateRows:
        """Describe the sequences to recurrent layers: a row of the batch is a slot."""
        return StateRows(self.rows, self.query_starts, self.context_lens, self.max_query_len, self.num_kept)


class StagedStep:
    """A layout on its way to the device. Layouts of equal size have their tensors at equal places of an upload."""

    def __init__(self, layout: StepLayout, upload: Upload) -> None:
        """Add the arrays to the upload."""
        self._tensors: StepTensors | None = None
        if not upload.is_copied:
            self._tensors = _shared(layout)
            return
        rows = upload.add(layout.rows)
        # Where each sequence has one token, these may be the same array.
        token_rows = rows if layout.token_rows is layout.rows else upload.add(layout.token_rows)
        self._staged = [
            upload.add(layout.token_ids),
            token_rows,
            upload.add(layout.positions),
            upload.add(layout.slots),
            rows,
            upload.add(layout.query_starts),
            upload.add(layout.context_lens),
        ]
        self._tree_masks = None if layout.tree_masks is None else upload.add(layout.tree_masks)
        self._num_kept = None if layout.num_kept is None else upload.add(layout.num_kept)
        self._window_slots = [upload.add(slots) for slots in layout.window_slots]
        self._max_query_len = layout.max_query_len

    @property
    def tensors(self) -> StepTensors:
        """Return the tensors of an upload that was sent or bound."""
        if self._tensors is not None:
            return self._tensors
        masks, kept = (None if staged is None else staged.tensor for staged in (self._tree_masks, self._num_kept))
        step = StepTensors(self._max_query_len, *[staged.tensor for staged in self._staged])  # type: ignore[arg-type]
        if masks is kept is None and not self._window_slots:
            return step
        window_slots = tuple(staged.tensor for staged in self._window_slots)
        return msgspec.structs.replace(step, tree_masks=masks, num_kept=kept, window_slots=window_slots)


def _shared(layout: StepLayout) -> StepTensors:
    """Return the arrays themselves as tensors: fewer operations of the host than an upload has that copies nothing."""
    rows = torch.from_numpy(layout.rows)
    return StepTensors(
        layout.max_query_len,
        torch.from_numpy(layout.token_ids),
        rows if layout.token_rows is layout.rows else torch.from_numpy(layout.token_rows),
        torch.from_numpy(layout.positions),
        torch.from_numpy(layout.slots),
        rows,
        torch.from_numpy(layout.query_starts),
        torch.from_numpy(layout.context_lens),
        None if layout.tree_masks is None else torch.from_numpy(layout.tree_masks),
        None if layout.num_kept is None else torch.from_numpy(layout.num_kept),
        tuple(map(torch.from_numpy, layout.window_slots)),
    )
