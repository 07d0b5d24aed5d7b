"""What attention is told of a step of one sequence."""

from __future__ import annotations

from typing import Any

import torch

from gpu_worker.layers.attention_context import AttentionContext
from kernels.layer_cache import LayerCache


def context_of_one(
    caches: list[LayerCache], count: int, before: int = 0, num_blocks: int = 1, **others: Any
) -> AttentionContext:
    """Return the context of some tokens, behind those `before`, of a sequence that has the first blocks."""
    return AttentionContext(
        caches,
        slot_mapping=torch.arange(before, before + count),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([before + count], dtype=torch.int32),
        max_query_len=count,
        max_context_len=before + count,
        **others,
    )
