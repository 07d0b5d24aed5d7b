"""An EAGLE layer and all that it guesses in one call, on CPUs with a compiler.

In bfloat16 its matrices are rounded to eight bits, and so are what they multiply: reading them is what takes the time,
and guesses are verified, so they need not be exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from gpu_worker.layers.eagle_form import EagleStep, EagleWeights, Place
from gpu_worker.layers.fused_decoder import stack_step
from gpu_worker.layers.layer_packing import LayerPacking
from gpu_worker.layers.layer_weights import LayerWeights, Projection
from gpu_worker.quantization.scaled_rows import int8_rows
from gpu_worker.quantization.weight_forms import DenseWeight, ScaledWeight
from kernels.cpu_library import CpuLibrary
from kernels.decoder_stack import CpuDecoderStack, CpuDraftChain, PackedMatrix, StackShape, StackStep

Head = Projection | PackedMatrix


class FusedEagle:
    """Packs the weights; the plain ones, but for the embedding, can be freed afterwards."""

    def __init__(self, library: CpuLibrary, shape: StackShape, weights: EagleWeights, head: Head) -> None:
        """Guess with the model's head: its matrix, or, packed for the layer's type already, what others use too."""
        packing = LayerPacking(library, weights.embedding.dtype)
        layer, join = weights.layer, weights.join
        if weights.embedding.dtype is torch.bfloat16:
            layer, join = _rounded_layer(layer), _rounded(join)
            head = _rounded(head) if isinstance(head, Projection) else head
        layers = [packing.pack(layer)]
        matrix = packing.matrix(join)
        self._stack = CpuDecoderStack(library, shape, weights.embedding, layers, None, weights.cos_sin, matrix)
        self._chain = CpuDraftChain(self._stack, packing.matrix(head) if isinstance(head, Projection) else head)

    def __call__(self, step: EagleStep) -> torch.Tensor:
        """Do what `EagleForm` promises."""
        return self._stack(self._step(step))

    def foretell(
        self, step: EagleStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> list[list[Place]]:
        """Do what `EagleForm` promises."""
        found = self._chain(self._step(step), limits, num_candidates, least_score)
        token_ids, scores = found.token_ids.tolist(), found.scores.tolist()
        return [
            [(token_ids[place][sequence], scores[place][sequence]) for place in range(count)]
            for sequence, count in enumerate(found.num_places.tolist())
        ]

    def _step(self, step: EagleStep) -> StackStep:
        hidden = step.hidden.to(self._stack.dtype).contiguous()
        return stack_step(step.token_ids, step.positions, step.context, hidden)


def _rounded_layer(layer: LayerWeights) -> LayerWeights:
    qkv, output, gate_up, down = map(_rounded, (layer.qkv, layer.output, layer.gate_up, layer.down))
    return dataclasses.replace(layer, qkv=qkv, output=output, gate_up=gate_up, down=down)


def _rounded(projection: Projection) -> Projection:
    if not isinstance(projection.weight, DenseWeight):
        return projection
    rows = int8_rows(projection.weight.weight.float())
    return Projection(ScaledWeight(rows.values, rows.scales, "dynamic"), projection.bias)
