"""The decoder in one call a step, on CPUs with a compiler."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer_weights import LayerWeights, Projection
from gpu_worker.quantization.weight_forms import DenseWeight
from kernels.cpu_library import CpuLibrary, cpu_library
from kernels.decoder_stack import CpuDecoderStack, StackLayer, StackShape, StackStep
from kernels.linear.cpu import PackedWeight, pack

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

    __slots__ = ("_stack",)

    def __init__(
        self,
        library: CpuLibrary,
        shape: StackShape,
        embedding: torch.Tensor,
        layers: Iterable[LayerWeights],
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> None:
        """Make the stack, of dense weights. Shapes are those of `CpuDecoderStack`."""
        packed = [_pack_layer(library, weights) for weights in layers]
        self._stack = CpuDecoderStack(library, shape, embedding, packed, final_norm.float(), cos_sin)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Do what `DecoderForm` promises."""
        return self._stack(
            StackStep(
                token_ids,
                positions,
                context.caches,
                context.slot_mapping,
                context.block_tables,
                context.query_starts,
                context.context_lens,
            )
        )


def _pack_layer(library: CpuLibrary, weights: LayerWeights) -> StackLayer:
    def packed(projection: Projection, is_gated: bool = False) -> PackedWeight:
        assert isinstance(projection.weight, DenseWeight)
        return pack(library, projection.weight.weight, projection.bias, is_gated=is_gated)

    head_norm = weights.head_norm
    return StackLayer(
        attention_norm=weights.attention_norm.float(),
        qkv=packed(weights.qkv),
        output=packed(weights.output),
        mlp_norm=weights.mlp_norm.float(),
        gate_up=packed(weights.gate_up, is_gated=True),
        down=packed(weights.down),
        query_norm=None if head_norm is None else head_norm.query.float(),
        key_norm=None if head_norm is None else head_norm.key.float(),
        sliding_window=weights.shape.sliding_window,
    )
