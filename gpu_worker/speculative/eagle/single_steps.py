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
        # Sequences that take no part in the last steps may have no block there.
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

    def step(self, number: int, rows: torch.Tensor | None) -> tuple[torch.Tensor, AttentionContext]:
        """Return the positions and the batch of a step with these sequences, by their numbers; None is all."""
        context, positions, slots = self._context, self._positions[number], self._slots[number]
        lengths, tables, starts = self._context_lens[number], context.block_tables, context.query_starts
        if rows is not None:
            positions, slots, lengths, tables = (part[rows] for part in (positions, slots, lengths, tables))
            starts = starts[: len(rows) + 1]
        return positions, dataclasses.replace(
            context,
            slot_mapping=slots,
            block_tables=tables,
            query_starts=starts,
            context_lens=lengths,
            max_context_len=context.max_context_len + number + 1,
        )
