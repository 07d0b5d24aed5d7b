"""An EAGLE layer and all that it drafts in one call, on CPUs with a compiler.

In bfloat16 its matrices are rounded to eight bits, and so are what they multiply: reading them is what takes the time,
and drafts are verified, so they need not be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpu_worker.layers.attention import AttentionWeights
from gpu_worker.layers.fused_decoder import stack_step
from gpu_worker.layers.gated_mlp import GatedWeights
from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.layer_packing import LayerPacking
from gpu_worker.layers.linear import Projection
from gpu_worker.quantization.scaled_rows import int8_rows
from gpu_worker.speculative.hidden_vectors.form import (
    Candidates,
    DraftLayerWeights,
    EntryStep,
    LayerHead,
    NormedJoin,
    PairNorms,
)
from kernels.cpu_library import CpuLibrary
from kernels.decoder_stack import (
    ChainHead,
    CpuDecoderStack,
    CpuDraftChain,
    StackInputs,
    StackLayer,
    StackShape,
    StackStep,
)
from kernels.linear.forms import DenseWeight, ScaledWeight
from kernels.linear.panels import PanelMatrix


class FusedEagle:
    """Packs the weights; the plain ones, but for the embedding, can be freed afterwards."""

    def __init__(self, library: CpuLibrary, shape: StackShape, weights: DraftLayerWeights) -> None:
        dtype = weights.embedding.dtype
        packing = _Packing(LayerPacking(library, dtype), is_rounded=dtype is torch.bfloat16)
        mixer = weights.layer.mixer
        assert isinstance(mixer, AttentionWeights)
        assert not isinstance(weights.inputs, NormedJoin), "the kernel does not normalise what it joins"
        self._rotations = weights.rotations
        cos_sin = self._rotations.of(mixer.shape.rotary, mixer.shape.head_dim, mixer.shape.rotary_dim)
        layers, inputs = [packing.layer(weights.layer)], packing.inputs(weights.embedding.weight, weights.inputs)
        self._stack = CpuDecoderStack(library, shape, inputs, layers, None, cos_sin)
        self._chain = CpuDraftChain(self._stack, packing.head(weights.head, dtype))

    def __call__(self, step: EntryStep) -> torch.Tensor:
        """Do what `LayerForm` promises."""
        self._rotations.cover(step.positions)
        return self._stack(self._step(step))

    def draft(
        self, step: EntryStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> list[list[Candidates]]:
        """Do what `LayerForm` promises."""
        # Each draft is one token further.
        self._rotations.cover(step.positions + max(limits))
        found = self._chain(self._step(step), limits, num_candidates, least_score)
        token_ids, scores = found.token_ids.tolist(), found.scores.tolist()
        return [
            [(token_ids[depth][sequence], scores[depth][sequence]) for depth in range(count)]
            for sequence, count in enumerate(found.num_places.tolist())
        ]

    def _step(self, step: EntryStep) -> StackStep:
        hidden = step.hidden.to(self._stack.dtype).contiguous()
        return stack_step(step.token_ids, step.positions, step.context, hidden)


def can_fuse(head: LayerHead, dtype: torch.dtype) -> bool:
    """Say whether the kernel can read the head: one of its own, or the model's, packed for the layer's type."""
    return isinstance(head.matrix, Projection) or head.matrix.packed_for(dtype) is not None


@dataclass(frozen=True, slots=True)
class _Packing:
    packing: LayerPacking
    is_rounded: bool

    def layer(self, weights: LayerWeights) -> StackLayer:
        mixer, feed_forward = weights.mixer, weights.feed_forward
        assert isinstance(mixer, AttentionWeights)
        assert isinstance(feed_forward, GatedWeights)
        mixer = replace(mixer, qkv=self._rounded(mixer.qkv), output=self._rounded(mixer.output))
        gate_up, down = self._rounded(feed_forward.gate_up), self._rounded(feed_forward.down)
        feed_forward = replace(feed_forward, gate_up=gate_up, down=down)
        return self.packing.pack(replace(weights, mixer=mixer, feed_forward=feed_forward))

    def inputs(self, embedding: torch.Tensor, inputs: Projection | PairNorms) -> StackInputs:
        if isinstance(inputs, Projection):
            return StackInputs(embedding, embedding.dtype, join=self._matrix(inputs))
        norms = torch.stack((inputs.embedding.float(), inputs.hidden.float()))
        return StackInputs(embedding, embedding.dtype, pair_norms=norms, is_stream_normed=inputs.is_stream_normed)

    def head(self, head: LayerHead, dtype: torch.dtype) -> ChainHead:
        matrix = self._matrix(head.matrix) if isinstance(head.matrix, Projection) else head.matrix.packed_for(dtype)
        assert matrix is not None
        return ChainHead(matrix, None if head.norm is None else head.norm.float(), head.token_ids)

    def _matrix(self, projection: Projection) -> PanelMatrix:
        return self.packing.matrix(self._rounded(projection))

    def _rounded(self, projection: Projection) -> Projection:
        if not (self.is_rounded and isinstance(projection.weight, DenseWeight)):
            return projection
        rows = int8_rows(projection.weight.weight.float())
        return Projection(ScaledWeight(rows.values, rows.scales, "dynamic"), projection.bias)
