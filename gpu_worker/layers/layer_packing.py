"""From a layer's weights to what the fused kernels of a CPU read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.layer_weights import LayerWeights, Projection
from kernels.cpu_library import CpuLibrary
from kernels.decoder_stack import StackLayer
from kernels.linear.forms import SplitWeight
from kernels.linear.panels import PanelMatrix, pack_panels


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

    def _parts(self, projection: Projection, *, is_gated: bool = False) -> list[PanelMatrix]:
        form, bias = projection.weight, projection.bias
        if not isinstance(form, SplitWeight):
            return [self.matrix(projection, is_gated=is_gated)]
        rows = [part.shape[0] for part in form.parts]
        biases = [None] * len(rows) if bias is None else bias.split_with_sizes(rows)
        return [self.matrix(Projection(*pair)) for pair in zip(form.parts, biases, strict=True)]

    def matrix(self, projection: Projection, *, is_gated: bool = False) -> PanelMatrix:
        """Pack one matrix."""
        return pack_panels(self.library, projection.weight, self.dtype, projection.bias, is_gated=is_gated)
