"""The decoder in one call a step, on CPUs with a compiler."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer_weights import LayerWeights, Projection
from gpu_worker.layers.quantized_linear import kernel_weight
from gpu_worker.quantization.weight_forms import (
    DenseWeight,
    GroupQuantizedWeight,
    ScaledWeight,
    SplitWeight,
    WeightForm,
)
from kernels.cpu_library import CpuLibrary, cpu_library
from kernels.decoder_stack import CpuDecoderStack, PackedMatrix, StackLayer, StackShape, StackStep
from kernels.linear.cpu import pack
from kernels.quantized_linear.cpu import can_pack_quantized, pack_quantized

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
        """Make the stack. Shapes are those of `CpuDecoderStack`."""
        packed = [_LayerPacking(library, embedding.dtype).pack(weights) for weights in layers]
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
                context.tree_masks,
            )
        )

    def first(self, num_layers: int) -> FusedDecoder:
        """Do what `DecoderForm` promises."""
        short = copy.copy(self)
        short._stack = self._stack.first(num_layers)
        return short


@dataclass(frozen=True, slots=True)
class _LayerPacking:
    """How matrices are packed: dense ones, and those of forms that the kernel does not know, in the model's type."""

    library: CpuLibrary
    dtype: torch.dtype

    def pack(self, weights: LayerWeights) -> StackLayer:
        head_norm = weights.head_norm
        return StackLayer(
            attention_norm=weights.attention_norm.float(),
            qkv=self._parts(weights.qkv),
            output=self._matrix(weights.output),
            mlp_norm=weights.mlp_norm.float(),
            gate_up=self._parts(weights.gate_up, is_gated=True),
            down=self._matrix(weights.down),
            query_norm=None if head_norm is None else head_norm.query.float(),
            key_norm=None if head_norm is None else head_norm.key.float(),
            sliding_window=weights.shape.sliding_window,
        )

    def _parts(self, projection: Projection, *, is_gated: bool = False) -> list[PackedMatrix]:
        form, bias = projection.weight, projection.bias
        if not isinstance(form, SplitWeight):
            return [self._matrix(projection, is_gated=is_gated)]
        rows = [part.shape[0] for part in form.parts]
        biases = [None] * len(rows) if bias is None else bias.split_with_sizes(rows)
        return [self._matrix(Projection(*pair)) for pair in zip(form.parts, biases, strict=True)]

    def _matrix(self, projection: Projection, *, is_gated: bool = False) -> PackedMatrix:
        form, bias = projection.weight, projection.bias
        if isinstance(form, GroupQuantizedWeight | ScaledWeight):
            weight = kernel_weight(form)
            if can_pack_quantized(weight):
                return pack_quantized(self.library, weight, bias, is_gated=is_gated)
        return pack(self.library, self._dense(form), bias, is_gated=is_gated)

    def _dense(self, form: WeightForm) -> torch.Tensor:
        return form.weight if isinstance(form, DenseWeight) else form.dequantize().to(self.dtype)
