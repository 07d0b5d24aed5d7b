"""The hidden vectors of a sequence for which the draft layer has not computed entries yet.

Entry `i` of the layer's KV cache is computed from the model's hidden vector at position `i` and from token `i + 1`,
which the model sampled from that vector. So the layer sees the sequence shifted by one token.
"""

from __future__ import annotations

import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.drafts.proposer import ComputedTokens


class PendingEntries:
    """Owns the vectors, which belong to neighbouring positions, and the sequence as the layer sees it.

    Attributes:
        shifted: The sequence without its first token: position `i` has token `i + 1`.
        start: Position of the first vector.
        count: Vectors that are kept.
    """

    __slots__ = ("_chunks", "_original", "count", "shifted", "start")

    def __init__(self, original: BatchSequence) -> None:
        """Keep nothing."""
        self.shifted = Sequence(original.id, [], original.num_prompt_tokens - 1, original.sampling, 0)
        self._original = original
        self.clear()

    @property
    def end(self) -> int:
        """Position behind the last vector."""
        return self.start + self.count

    @property
    def has_prompt(self) -> bool:
        """Say whether the first vector belongs to the prompt."""
        return self.count > 0 and self.start < self.shifted.num_prompt_tokens

    def clear(self) -> None:
        """Drop all vectors."""
        self._chunks: list[torch.Tensor] = []
        self.start = self.count = 0

    def add(self, computed: ComputedTokens) -> None:
        """Keep the vectors that a step computed. Where they do not continue those kept so far, those are dropped."""
        start, new = computed.start, computed.token_ids[1:]
        if not new:
            return
        if start != self.start + self.count:
            self.clear()
            self.start = start
        self._chunks.append(computed.hidden)
        self.count += len(new)
        token_ids = self.shifted.token_ids
        if len(token_ids) != start:
            # Drafts were rejected, or tokens came from the prefix cache: take the tokens up to here from the original.
            known = min(len(token_ids), start)
            PlanWriter.rewind(self.shifted, known)
            token_ids[known:] = self._original.token_ids[known + 1 : start + 1]
        token_ids += new

    def take(self, count: int) -> tuple[ScheduledSequence, torch.Tensor]:
        """Remove the first `count` vectors; return them with the share of a step in which the layer computes them."""
        if self.shifted.block_table is not self._original.block_table:
            self.shifted.block_table, self.shifted.num_told_blocks = self._original.block_table, 0
        rows = self._chunks[0] if len(self._chunks) == 1 else torch.cat(self._chunks)
        item = ScheduledSequence(self.shifted, self.start, count, False)
        # A copy, since a view of few rows would keep all of them in memory.
        self._chunks = [rows[count:].clone()] if count < self.count else []
        self.start += count
        self.count -= count
        return item, rows[:count]
