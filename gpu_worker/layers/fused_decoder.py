"""The decoder in one call a step, on CPUs with a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.expert_loads import ExpertLoads
from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.layer_packing import LayerPacking
from kernels.collectives import Exchange
from kernels.cpu_library import CpuLibrary, cpu_library
from kernels.decoder_stack import CpuDecoderStack, StackInputs, StackShape, StackStep

_DTYPES = (torch.float32, torch.bfloat16)


def fusing_library(shape: StackShape, dtype: torch.dtype, device: torch.device) -> CpuLibrary | None:
    """Return the compiled kernels when they can compute such a decoder, else None."""
    # Matrices are packed by 32 bits of input, so 16-bit inputs must be even in number.
    is_even = all(size % 2 == 0 for size in (shape.hidden_size, shape.intermediate_size, shape.head_dim))
    if device.type != "cpu" or dtype not in _DTYPES or not is_even or not shape.can_run():
        return None
    return cpu_library()


class FusedDecoder:
    """Packs the weights layer by layer; the plain ones can be freed afterwards."""

    __slots__ = ("_stack", "_tokens_per_expert")

    def __init__(
        self,
        library: CpuLibrary,
        shape: StackShape,
        dtype: torch.dtype,
        embedding: torch.Tensor,
        layers: Iterable[LayerWeights],
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
        tapped_layers: Sequence[int] = (),
        exchange: Exchange | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Make the stack, which computes in `dtype`. Shapes are those of `CpuDecoderStack`.

        Where the model is divided, so are `shape`, `embedding` and `layers`; `StackInputs` has the last two arguments.
        """
        packed = [LayerPacking(library, dtype).pack(weights) for weights in layers]
        mixtures = [layer.mixture for layer in packed if layer.mixture is not None]
        self._tokens_per_expert = [mixture.experts.tokens_per_expert for mixture in mixtures]
        inputs = StackInputs(embedding, dtype, exchange=exchange, vocab_size=vocab_size)
        self._stack = CpuDecoderStack(library, shape, inputs, packed, final_norm.float(), cos_sin, tapped_layers)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Do what `DecoderForm` promises."""
        return self._stack(stack_step(token_ids, positions, context))

    def expert_loads(self) -> ExpertLoads | None:
        """Return what reads how tokens fall on experts; None where there are no mixtures."""
        return ExpertLoads(self._tokens_per_expert) if self._tokens_per_expert else None


def stack_step(
    token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext, hidden: torch.Tensor | None = None
) -> StackStep:
    """Describe a step to the kernel; `hidden` is for stacks that join it with the tokens' embeddings."""
    return StackStep(
        token_ids,
        positions,
        context.caches,
        context.slot_mapping,
        context.block_tables,
        context.query_starts,
        context.context_lens,
        context.tree_masks,
        hidden,
    )
