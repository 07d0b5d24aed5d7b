"""The decoder in one call a step, on CPUs with a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from gpu_worker.core.step_interrupt import StepInterrupt
from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.layers.attention_context import AttentionContext, ScoredTokens
from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.layer_packing import LayerPacking
from gpu_worker.layers.media_inputs import MediaInputs, rotations_of
from gpu_worker.layers.mixture import ExpertLoads
from gpu_worker.layers.vocabulary import Embedding
from kernels.cpu_library import CpuLibrary
from kernels.decoder_stack import CpuDecoderStack, ReadQueries, StackShape, StackStep
from kernels.low_rank.cpu import CpuAdapterTable
from kernels.paged_attention import AttentionOptions

_DTYPES = (torch.float32, torch.bfloat16)


def can_fuse(shape: StackShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels, compiled or not, can compute such a decoder."""
    # Matrices are packed by 32 bits of input, so 16-bit inputs must be even in number.
    is_even = all(size % 2 == 0 for size in (shape.hidden_size, shape.intermediate_size, shape.head_dim))
    return device.type == "cpu" and dtype in _DTYPES and is_even and shape.can_run()


class FusedDecoder:
    """Packs the weights layer by layer; the plain ones can be freed afterwards."""

    def __init__(
        self,
        library: CpuLibrary,
        shape: StackShape,
        embedding: Embedding,
        layers: Iterable[LayerWeights],
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
        tapped_layers: Sequence[int] = (),
        vocab_size: int | None = None,
        adapters: AdapterTargets | None = None,
    ) -> None:
        packed = [LayerPacking(library, embedding.dtype, adapters).pack(weights) for weights in layers]
        mixtures = [layer.mixture for layer in packed if layer.mixture is not None]
        self._tokens_per_expert = [mixture.experts.tokens_per_expert for mixture in mixtures]
        self._embedding, self._cos_sin = embedding, cos_sin
        self._heads, self._options = (shape.num_heads, shape.head_dim), AttentionOptions(shape.head_dim**-0.5)
        self._num_layers, self._tapped_layers = len(packed), tuple(tapped_layers)
        table = None
        if adapters is not None:
            table = CpuAdapterTable(library, adapters.num_slots, embedding.dtype, is_lookup=True)
            adapters.add_embedding(vocab_size or len(embedding.weight), shape.hidden_size, 1.0, table)
        inputs = embedding.stack_inputs(vocab_size, None if table is None else table.address)
        self._stack = CpuDecoderStack(library, shape, inputs, packed, final_norm.float(), cos_sin, tapped_layers)

    def interrupt_by(self, interrupt: StepInterrupt) -> None:
        """From now on compute no further layer of a step with prompts that is asked to end, and return anything."""
        # The kernel has its address only.
        self._interrupt = interrupt
        self._stack.interrupt_at(interrupt.address)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Do what `DecoderForm` promises."""
        media, scored = context.media, context.scored
        read = None if scored is None else self._read_queries(len(token_ids), scored)
        if media is None:
            hidden = self._stack(stack_step(token_ids, positions, context, read))
        else:
            hidden = self._compute_media(token_ids, positions, context, media, read)
        if read is not None and scored is not None:
            for query, cache in zip(read.queries, context.caches, strict=True):
                scored.add(query, cache, context.block_tables, self._options)
        return hidden

    def _read_queries(self, num_tokens: int, scored: ScoredTokens) -> ReadQueries:
        rows, num_rows = torch.full((num_tokens,), -1, dtype=torch.int32), len(scored.tokens)
        rows[scored.tokens] = torch.arange(num_rows, dtype=torch.int32)
        return ReadQueries(rows, torch.empty(self._num_layers, num_rows, *self._heads, dtype=self._stack.dtype))

    def _compute_media(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        media: MediaInputs,
        read: ReadQueries | None,
    ) -> torch.Tensor:
        # Each token is a row of its own, of embeddings and of rotations that are the step's alone.
        cos_sin, places = rotations_of(media, self._cos_sin, positions)
        stream = self._embedding(token_ids)
        stream.index_copy_(0, media.places, media.rows)
        step = stack_step(torch.arange(len(token_ids)), places, context)
        taps = self._tapped_layers
        starts = sorted({0, *range(1, len(media.deep) + 1), *taps, self._num_layers})
        streams: dict[int, torch.Tensor] = {}
        for start, end in pairwise(starts):
            if start in taps:
                streams[start] = stream
            if read is not None:
                step = step._replace(read=read._replace(queries=read.queries[start:end]))
            stream = self._stack.from_vectors(step, stream, cos_sin, range(start, end))
            if end <= len(media.deep):
                stream.index_add_(0, media.places, media.deep[end - 1])
        return torch.cat((stream, *(streams[index] for index in taps)), 1) if taps else stream

    def expert_loads(self) -> ExpertLoads | None:
        """Return what reads how tokens fall on experts; None where there are no mixtures."""
        return ExpertLoads(self._tokens_per_expert) if self._tokens_per_expert else None


def stack_step(
    token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext, read: ReadQueries | None = None
) -> StackStep:
    """Describe a step to the kernel."""
    return StackStep(
        token_ids,
        positions,
        context.caches,
        context.slot_mapping,
        context.block_tables,
        context.query_starts,
        context.context_lens,
        context.adapters,
        read,
    )
