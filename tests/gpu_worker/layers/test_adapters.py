"""What adapters add to embeddings, and the ranks of the rows of a step."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.layers.adapters import AdapterTargets, EmbeddingAdapters
from kernels.low_rank import AdapterRows, LowRank, LowRankPart

_CPU = torch.device("cpu")


def test_embedding_of_a_vast_vocabulary_is_looked_up_by_the_tokens_alone() -> None:
    """A copy of this one would need 16 TB."""
    vocab_size, rank, size = 1 << 40, 4, 6
    down, up = torch.ones(rank, 1, dtype=torch.bfloat16).expand(rank, vocab_size), torch.ones(size, rank)
    embeddings = EmbeddingAdapters(2, _CPU)
    embeddings.place(
        1, embeddings.pack(LowRank((LowRankPart(down, up.bfloat16(), 0.5, torch.arange(size)),), (size, vocab_size)))
    )
    result = torch.zeros(3, size)
    embeddings.add(torch.tensor([5, vocab_size - 1, 7]), result, AdapterRows(np.array([1, 1, -1], np.int32), rank))
    assert result.tolist() == [[2.0] * size, [2.0] * size, [0.0] * size]


def test_rows_have_the_largest_rank_of_their_own_adapters() -> None:
    """Neither of others in memory, nor of those that have left."""
    targets = AdapterTargets(3, _CPU, torch.float32)
    for slot, rank in enumerate((8, 1, 256)):
        targets.place(slot, {}, rank)

    def rank_of(*slots: int) -> int:
        return targets.rows(np.array(slots, np.int32)).max_rank

    assert [rank_of(-1), rank_of(1, -1), rank_of(1, 0), rank_of(2, 1)] == [1, 1, 8, 256]
    targets.place(2, None)
    assert rank_of(2, 1) == 1


def test_rows_of_the_step_before_are_kept_until_they_or_an_adapter_change() -> None:
    targets = AdapterTargets(2, _CPU, torch.float32)
    same, other = np.array([0, -1, 1], np.int32), np.array([0, 1, 1], np.int32)
    rows = targets.rows(same)
    assert targets.rows(same.copy()) is rows
    assert targets.rows(other) is not rows
    assert targets.rows(same).slots.tolist() == [0, -1, 1]
    before = targets.rows(same)
    targets.place(1, {}, 8)
    assert targets.rows(same) is not before
    assert (before.max_rank, targets.rows(same).max_rank) == (1, 8)


def test_products_that_overflowed_in_the_step_before_are_forgotten() -> None:
    """A matrix with an odd number of ranks reads one more, which it multiplies by zero."""
    targets, slots = AdapterTargets(1, _CPU, torch.float32), np.zeros(1, np.int32)
    first, second = (targets.add((name,), (64,), 8)[0] for name in ("first", "second"))
    whole = torch.arange(64)

    def low_rank(rank: int) -> LowRank:
        down, up = torch.ones(rank, 8, dtype=torch.bfloat16), torch.ones(64, rank, dtype=torch.bfloat16)
        return LowRank((LowRankPart(down, up, 1.0, whole),), (64, 8))

    adapter = {"first": low_rank(4), "second": low_rank(3)}
    targets.place(0, targets.pack(adapter), 4)
    first.add(torch.full((1, 8), torch.inf), torch.zeros(1, 64), targets.rows(slots))
    result = torch.zeros(1, 64)
    second.add(torch.ones(1, 8), result, targets.rows(slots))
    assert result.tolist() == [[24.0] * 64]
