"""The decode steps of a draft, described all at once before their tokens are known, without waiting for the device."""

from __future__ import annotations

import torch
from msgspec import structs

from gpu_worker.layers.attention_context import AttentionContext

# Kernels are compiled anew for a pointer that is aligned otherwise: the numbers of each step begin on a multiple.
_ALIGNED_ITEMS = 16


class SingleSteps:
    """Positions and slots of the next tokens of a batch, one token of each sequence a step.

    A sequence takes part in one step for each draft token behind its first. In later steps it is padding.
    """

    def __init__(self, context: AttentionContext, limits: torch.Tensor, num_steps: int) -> None:
        """Continue behind `context`.

        Args:
            context: Of the step before.
            limits: Most draft tokens of each of its first sequences, which continue; block tables cover them.
            num_steps: Steps to describe.
        """
        tables, block_size = context.block_tables[: len(limits)], context.caches[0].keys.shape[1]
        steps = torch.arange(num_steps, device=limits.device)[:, None]
        takes_part = steps < limits - 1
        positions = torch.where(takes_part, context.context_lens[: len(limits)] + steps, 0)
        slots = tables.gather(1, (positions // block_size).T).T * block_size + positions % block_size
        self._positions = _aligned(positions)
        self._slots = _aligned(torch.where(takes_part, slots, -1))
        self._context_lens = _aligned(torch.where(takes_part, positions + 1, 0).int())
        self._context = structs.replace(
            context,
            block_tables=tables,
            query_starts=torch.arange(len(limits) + 1, dtype=torch.int32, device=limits.device),
            max_query_len=1,
        )

    def step(self, number: int) -> tuple[torch.Tensor, AttentionContext]:
        """Return the positions and the batch of a step."""
        return self._positions[number], structs.replace(
            self._context,
            slot_mapping=self._slots[number],
            context_lens=self._context_lens[number],
            max_context_len=self._context.max_context_len + number + 1,
        )


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return the same rows, each of which begins on a multiple of `_ALIGNED_ITEMS`."""
    width = rows.shape[1]
    return torch.nn.functional.pad(rows, (0, -width % _ALIGNED_ITEMS))[:, :width]
