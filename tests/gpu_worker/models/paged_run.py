"""Runs a model over a paged cache whose blocks are scattered, in steps that the test chooses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpu_worker.execution.memory.kv_cache import allocate_states
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.cache_layout import ReadsLayer
from gpu_worker.models.decoder import CausalLM
from kernels.layer_cache import EVERY_TOKEN, CachedTokens, CacheShape, LayerCache, allocate_caches
from kernels.state_rows import StateRows


def poisoned_cache(num_blocks: int, block_size: int, shape: CacheShape, dtype: torch.dtype) -> LayerCache:
    """Make a cache of NaN, so that reading a slot that no token was written to shows."""
    cache = allocate_caches(1, num_blocks, block_size, shape, dtype, torch.device("cpu")).layers()[0]
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    return cache


class PagedRun:
    """Sequences under computation; `step()` computes the next tokens of some of them in one batch."""

    def __init__(
        self,
        model: CausalLM,
        sequences: list[torch.Tensor],
        block_size: int = 4,
        max_draft_tokens: int = 0,
        kept: CachedTokens = EVERY_TOKEN,
    ) -> None:
        config = model.config
        num_blocks = sum(-(-len(sequence) // block_size) for sequence in sequences) + 3
        self.model = model
        self.sequences = sequences
        self.block_size = block_size
        self.kept = kept
        layout = config.cache_layout
        plain = CacheShape(config.num_kv_heads, config.head_dim, config.head_dim)
        memories = map(layout.tokens_of, range(len(layout.layers)))
        shapes, room = [plain if memory is None else memory.shape for memory in memories], block_size // kept.step
        self.caches = [poisoned_cache(num_blocks, room, shape, model.dtype) for shape in shapes]
        for layer, memory in enumerate(layout.layers):
            if isinstance(memory, ReadsLayer):
                self.caches[layer] = self.caches[memory.layer]
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables = [[free.pop() for _ in range(-(-len(sequence) // block_size))] for sequence in sequences]
        self.computed = [0 for _ in sequences]
        self.states = allocate_states(layout, len(sequences), max_draft_tokens, torch.device("cpu"))
        for state in () if self.states is None else self.states.layers:
            for part in () if state is None else state.parts:
                part.fill_(torch.nan)

    def step(self, num_tokens: dict[int, int]) -> dict[int, torch.Tensor]:
        """Compute the next `num_tokens[s]` tokens of each sequence `s`; return their logits."""
        positions = {s: torch.arange(self.computed[s], self.computed[s] + count) for s, count in num_tokens.items()}
        for s, count in num_tokens.items():
            self.computed[s] += count
        tokens = torch.cat([self.sequences[s][positions[s]] for s in num_tokens])
        with torch.inference_mode():
            hidden = self.model.forward(tokens, torch.cat(list(positions.values())), self.context(positions))
            logits = self.model.logits(hidden)
        return dict(zip(num_tokens, logits.split(list(num_tokens.values())), strict=True))

    def steps(self, steps: Iterable[dict[int, int]]) -> list[torch.Tensor]:
        """Do several steps; return all logits of each sequence."""
        rows: dict[int, list[torch.Tensor]] = {s: [] for s in range(len(self.sequences))}
        for step in steps:
            for s, logits in self.step(step).items():
                rows[s].append(logits)
        return [torch.cat(parts) for parts in rows.values()]

    def context(self, positions: dict[int, torch.Tensor]) -> AttentionContext:
        tables = [torch.tensor(self.tables[s]) for s in positions]
        slots = [
            table[where // self.block_size] * self.block_size + where % self.block_size
            for table, where in zip(tables, positions.values(), strict=True)
        ]
        if self.kept.step > 1:
            slots = [torch.where(own % self.kept.step == self.kept.first, own // self.kept.step, -1) for own in slots]
        counts = [len(where) for where in positions.values()]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        context_lens = torch.tensor([self.computed[s] for s in positions], dtype=torch.int32)
        rows = StateRows(torch.tensor(list(positions)), starts, context_lens, max(counts))
        return AttentionContext(
            caches=self.caches,
            slot_mapping=torch.cat(slots),
            block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int(),
            query_starts=starts,
            context_lens=context_lens,
            max_query_len=max(counts),
            max_context_len=max(self.computed[s] for s in positions),
            states=() if self.states is None else self.states.layers,
            state_rows=None if self.states is None else rows,
        )
