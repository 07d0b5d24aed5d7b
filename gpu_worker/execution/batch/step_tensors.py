"""A step's layout on the device: what the model's input is gathered from."""

from __future__ import annotations

import torch
from msgspec import Struct

from gpu_worker.execution.batch.layout import StepLayout
from gpu_worker.execution.batch.state_layout import Int32s, Int64s, StateLayout
from gpu_worker.execution.batch.transfers import Upload
from kernels.state_rows import StateRows, StateSaves


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
    state_slots: torch.Tensor | None = None
    saves: StateSaves | None = None

    @property
    def state_rows(self) -> StateRows:
        """Describe the sequences to recurrent layers."""
        assert self.state_slots is not None, "the step was laid out without states"
        starts, contexts, most = self.query_starts, self.context_lens, self.max_query_len
        return StateRows(self.state_slots, starts, contexts, most, self.num_kept, self.saves)


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
        self._states = [] if layout.states is None else [upload.add(array) for array in _arrays(layout.states)]
        self._max_query_len = layout.max_query_len

    @property
    def tensors(self) -> StepTensors:
        """Return the tensors of an upload that was sent or bound."""
        if self._tensors is not None:
            return self._tensors
        token_ids, token_rows, positions, slots, rows, starts, contexts = (staged.tensor for staged in self._staged)
        masks, kept = (None if staged is None else staged.tensor for staged in (self._tree_masks, self._num_kept))
        states = _state_tensors([staged.tensor for staged in self._states])
        inputs = (token_ids, token_rows, positions, slots, rows, starts, contexts)
        windows = tuple(staged.tensor for staged in self._window_slots)
        return StepTensors(self._max_query_len, *inputs, masks, kept, windows, *states)


def _arrays(states: StateLayout) -> list[Int32s | Int64s]:
    """Return the arrays that there are: the slots alone, or all four."""
    arrays = (states.slots, states.save_starts, states.save_tokens, states.save_slots)
    return [array for array in arrays if array is not None]


def _state_tensors(tensors: list[torch.Tensor]) -> tuple[torch.Tensor | None, StateSaves | None]:
    """Return the slots, and the copies to make, of the tensors of `_arrays`."""
    if not tensors:
        return None, None
    return tensors[0], StateSaves(*tensors[1:]) if len(tensors) > 1 else None


def _shared(layout: StepLayout) -> StepTensors:
    """Return the arrays themselves as tensors: fewer operations of the host than an upload has that copies nothing."""
    rows = torch.from_numpy(layout.rows)
    states = [] if layout.states is None else [torch.from_numpy(array) for array in _arrays(layout.states)]
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
        *_state_tensors(states),
    )
