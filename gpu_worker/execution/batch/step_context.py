"""What layers need to know of a step, from its tensors, the rows of the batch and the memory of the runner."""

from __future__ import annotations

from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.step_tensors import StepTensors
from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.execution.memory.state_pool import StatePool
from gpu_worker.layers.attention_context import AttentionContext, WindowContext


def step_context(
    step: StepTensors, rows: BatchRows, cache: KVCache, states: StatePool | None, max_context_len: int
) -> AttentionContext:
    """Describe a step to the layers; `max_context_len` tokens of a sequence are in the cache at most."""
    return AttentionContext(
        caches=cache.layers,
        slot_mapping=step.slots,
        block_tables=rows.block_tables(step.rows),
        query_starts=step.query_starts,
        context_lens=step.context_lens,
        max_query_len=step.max_query_len,
        max_context_len=max_context_len,
        tree_masks=step.tree_masks,
        windows=[
            WindowContext(slots, tables.of(step.rows))
            for slots, tables in zip(step.window_slots, rows.windows, strict=True)
        ],
        group_of_layer=cache.layout.group_of_layer,
        states=() if states is None else states.layers,
        state_rows=None if states is None else step.state_rows,
    )
