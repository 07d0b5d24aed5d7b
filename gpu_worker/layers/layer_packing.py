"""From a layer's weights to what the fused kernels of a CPU read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.layer_weights import LayerWeights, Projection
from gpu_worker.layers.quantized_linear import kernel_weight
from gpu_worker.quantization.weight_forms import (
    DenseWeight,
    GroupQuantizedWeight,
    ScaledWeight,
    SplitWeight,
    WeightForm,
)
from kernels.cpu_library import CpuLibrary
from kernels.decoder_stack import PackedMatrix, StackLayer
from kernels.linear.cpu.cpu import can_pack_quantized, pack_quantized
from kernels.linear.dense.cpu import pack


@dataclass(frozen=True, slots=True)
class LayerPacking:
    """How matrices are packed: dense ones, and those of forms that the kernel does not know, in the model's type."""

    library: CpuLibrary
    dtype: torch.dtype

    def pack(self, weights: LayerWeights) -> StackLayer:
        """Pack a layer's matrices, and make the others float32."""
        head_norm = weights.head_norm
        return StackLayer(
            attention_norm=None if weights.attention_norm is None else weights.attention_norm.float(),
            qkv=self._parts(weights.qkv),
            output=self.matrix(weights.output),
            mlp_norm=weights.mlp_norm.float(),
            gate_up=self._parts(weights.gate_up, is_gated=True),
            down=self.matrix(weights.down),
            query_norm=None if head_norm is None else head_norm.query.float(),
            key_norm=None if head_norm is None else head_norm.key.float(),
            sliding_window=weights.shape.sliding_window,
        )

    def _parts(self, projection: Projection, *, is_gated: bool = False) -> list[PackedMatrix]:
        form, bias = projection.weight, projection.bias
        if not isinstance(form, SplitWeight):
            return [self.matrix(projection, is_gated=is_gated)]
        rows = [part.shape[0] for part in form.parts]
        biases = [None] * len(rows) if bias is None else bias.split_with_sizes(rows)
        return [self.matrix(Projection(*pair)) for pair in zip(form.parts, biases, strict=True)]

    def matrix(self, projection: Projection, *, is_gated: bool = False) -> PackedMatrix:
        """Pack one matrix."""
        form, bias = projection.weight, projection.bias
        if isinstance(form, GroupQuantizedWeight | ScaledWeight):
            weight = kernel_weight(form)
            if can_pack_quantized(weight):
                return pack_quantized(self.library, weight, bias, is_gated=is_gated)
        return pack(self.library, self._dense(form), bias, is_gated=is_gated)

    def _dense(self, form: WeightForm) -> torch.Tensor:
        return form.weight if isinstance(form, DenseWeight) else form.dequantize().to(self.dtype)
