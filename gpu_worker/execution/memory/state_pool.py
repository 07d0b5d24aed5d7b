"""The memory of recurrent layers: slots of a fixed size, for sequences however long, and for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import torch

from gpu_worker.layers.cache_layout import CacheLayout
from gpu_worker.layers.layer_state import LayerState


@dataclass(frozen=True, slots=True)
class StatePool:
    """The states of all layers, by slot.

    Attributes:
        layers: In order; None for those without a state.
        max_draft_tokens: Of a sequence, that are kept until it is known which of them stand.
    """

    layers: Values[LayerState | None]
    max_draft_tokens: int

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy states from slots to others, which may be sources too; no slot is twice in `targets`.

        Shapes:
            sources, targets: `[num_states]` int64
        """
        for layer in self.layers:
            for part in () if layer is None else layer.parts:
                part.index_copy_(0, targets, part.index_select(0, sources))


def allocate_states(
    layout: CacheLayout, num_slots: int, max_draft_tokens: int, device: torch.device
) -> StatePool | None:
    """Allocate the states of a model's recurrent layers, and of padding; None where it has none."""
    if not layout.state_layers:
        return None
    layers: list[LayerState | None] = []
    for layer in range(len(layout.layers)):
        memory = layout.state_of(layer)
        if memory is None:
            layers.append(None)
            continue
        # Zeros take no memory of a host before they are written.
        parts = [torch.zeros(num_slots + 1, *part.shape, dtype=part.dtype, device=device) for part in memory.parts]
        drafts = torch.zeros(num_slots + 1, max_draft_tokens, memory.num_inputs, device=device)
        layers.append(LayerState(tuple(parts), drafts if max_draft_tokens else None))
    return StatePool(layers, max_draft_tokens)


def state_pool_bytes(layout: CacheLayout, num_slots: int, max_draft_tokens: int) -> int:
    """Return the memory of what `allocate_states` allocates."""
    return (num_slots + 1) * slot_bytes(layout, max_draft_tokens)


def slot_bytes(layout: CacheLayout, max_draft_tokens: int) -> int:
    """Return the memory of one slot; 0 without recurrent layers."""
    draft_bytes = sum(state.num_inputs for state in layout.states) * max_draft_tokens * torch.float32.itemsize
    return layout.state_bytes + draft_bytes
