"""An EAGLE layer and all that it guesses in one call, on CPUs with a compiler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.eagle_form import EagleStep, EagleWeights, Place
from gpu_worker.layers.fused_decoder import stack_step
from gpu_worker.layers.layer_packing import LayerPacking
from kernels.cpu_library import CpuLibrary
from kernels.decoder_stack import CpuDecoderStack, CpuDraftChain, PackedMatrix, StackShape, StackStep


class FusedEagle:
    """Packs the weights; the plain ones, but for the embedding, can be freed afterwards."""

    def __init__(self, library: CpuLibrary, shape: StackShape, weights: EagleWeights, head: PackedMatrix) -> None:
        """Guess with the model's head, packed for the layer's type."""
        packing = LayerPacking(library, weights.embedding.dtype)
        layers = [packing.pack(weights.layer)]
        join = packing.matrix(weights.join)
        self._stack = CpuDecoderStack(library, shape, weights.embedding, layers, None, weights.cos_sin, join)
        self._chain = CpuDraftChain(self._stack, head)

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
