"""Steps of one token a sequence, one behind the other, described at once."""

from __future__ import annotations

import dataclasses

import torch

from gpu_worker.layers.attention_context import AttentionContext


class SingleSteps:
    """Where the next tokens of a batch's sequences lie, whichever tokens they are."""

    def __init__(self, context: AttentionContext, num_sequences: int, num_steps: int) -> None:
        """Continue behind `context` with its first `num_sequences` sequences, whose block tables cover the steps."""
        tables, block_size = context.block_tables[:num_sequences], context.caches[0].keys.shape[1]
        lengths = context.context_lens[:num_sequences].long()
        positions = lengths + torch.arange(num_steps, device=lengths.device)[:, None]
        # Sequences that take no part in the last steps may have no place there.
        blocks = (positions // block_size).clamp_(max=tables.shape[1] - 1)
        self._positions = positions
        self._slots = (tables.gather(1, blocks.T).T * block_size + positions % block_size).contiguous()
        self._context_lens = (positions + 1).int()
        self._context = dataclasses.replace(
            context,
            block_tables=tables,
            query_starts=torch.arange(num_sequences + 1, dtype=torch.int32, device=lengths.device),
            max_query_len=1,
        )

    def step(self, number: int, num_sequences: int) -> tuple[torch.Tensor, AttentionContext]:
        """Return the positions and the batch of a step with the first `num_sequences` sequences."""
        context = self._context
        return self._positions[number, :num_sequences], dataclasses.replace(
            context,
            slot_mapping=self._slots[number, :num_sequences],
            block_tables=context.block_tables[:num_sequences],
            query_starts=context.query_starts[: num_sequences + 1],
            context_lens=self._context_lens[number, :num_sequences],
            max_context_len=context.max_context_len + number + 1,
        )
