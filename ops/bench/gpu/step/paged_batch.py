"""A step's tensors without an engine: sequences of chosen lengths in scattered blocks of a cache."""

from __future__ import annotations

from itertools import accumulate

import torch

from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.execution.memory.state_pool import allocate_states
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.models.decoder import CausalLM
from kernels.sampling import SamplingParameters, sample_tokens
from kernels.state_rows import StateRows


class PagedBatch:
    """Gives each of `num_seqs` sequences room for `max_len` tokens, in blocks drawn at random from the whole cache.

    Owns the sequences' states, in models with recurrent layers.
    """

    def __init__(self, cache: KVCache, num_seqs: int, max_len: int) -> None:
        """Draw the blocks."""
        width = -(-max_len // cache.block_size)
        if num_seqs * width > cache.num_blocks:
            needed = num_seqs * width
            raise ValueError(
                f"{num_seqs} sequences of {max_len} tokens need {needed} blocks; there are {cache.num_blocks}"
            )
        self._cache = cache
        device = cache.layers[0].keys.device
        order = torch.randperm(cache.num_blocks, device=device)[: num_seqs * width]
        self._tables = order.view(num_seqs, width).int()
        self._states = allocate_states(cache.layout, num_seqs, 0, device)

    def step(self, lengths: list[tuple[int, int]]) -> tuple[torch.Tensor, AttentionContext]:
        """Return the positions and the context of a step.

        Args:
            lengths: Of each sequence the tokens that the step computes, and the tokens in the cache after it.
        """
        device, block_size = self._tables.device, self._cache.block_size
        queries = [query for query, _ in lengths]
        positions = torch.cat([torch.arange(context - query, context, device=device) for query, context in lengths])
        rows = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(queries, device=device))
        query_starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device)
        context_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device)
        slots = torch.arange(len(lengths), device=device)
        context = AttentionContext(
            caches=self._cache.layers,
            slot_mapping=self._tables[rows, positions // block_size].long() * block_size + positions % block_size,
            block_tables=self._tables[: len(lengths)],
            query_starts=query_starts,
            context_lens=context_lens,
            max_query_len=max(queries),
            max_context_len=max(context for _, context in lengths),
            states=() if self._states is None else self._states.layers,
            state_rows=StateRows(slots, query_starts, context_lens, max(queries)) if self._states else None,
        )
        return positions, context


class StaticStep:
    """One step of a model, again and again on the same tensors, so that it can be captured in a graph."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        lengths: list[tuple[int, int]],
        max_len: int,
        *,
        samples_all: bool = False,
    ) -> None:
        """Make the inputs."""
        device = model.device
        self._model = model
        batch = PagedBatch(cache, len(lengths), max_len)
        self._positions, self._context = batch.step(lengths)
        self._token_ids = torch.randint(model.config.vocab_size, self._positions.shape, device=device)
        last_rows = self._context.query_starts[1:].long() - 1
        self._sampled_rows = torch.arange(len(self._token_ids), device=device) if samples_all else last_rows
        self._slots = torch.arange(len(self._sampled_rows), device=device)
        zeros = torch.zeros(len(self._sampled_rows), device=device)
        # A temperature of zero, and nothing truncated.
        self._greedy = SamplingParameters(zeros, zeros - torch.inf, zeros.int(), zeros + 1, zeros.long())

    @torch.inference_mode()
    def __call__(self, _: int) -> torch.Tensor:
        """Compute the step up to its tokens, which stay on the device."""
        hidden = self._model.forward(self._token_ids, self._positions, self._context)
        if len(hidden) != len(self._sampled_rows):
            hidden = hidden[self._sampled_rows]
        return sample_tokens(self._model.logits(hidden), self._slots, self._slots, self._greedy, may_truncate=False)
