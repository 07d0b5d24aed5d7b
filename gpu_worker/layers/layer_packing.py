"""From a layer's weights to what the fused kernels of a CPU read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.layer_traits import AttentionShape, GatedShape, HeadNorm, LayerTraits
from gpu_worker.layers.layer_weights import (
    AttentionWeights,
    GatedWeights,
    LayerWeights,
    MixtureWeights,
    NormWeights,
    Projection,
)
from gpu_worker.layers.mixture_shape import MixtureShape
from kernels.activation import Activation
from kernels.cpu_library import CpuLibrary
from kernels.decoder_stack import StackLayer
from kernels.linear.forms import SplitWeight
from kernels.linear.panels import PanelMatrix, pack_panels
from kernels.moe import GatedActivation
from kernels.moe.cpu import MAX_EXPERTS, CpuMixture, make_cpu_mixture


def can_pack(traits: LayerTraits) -> bool:
    """Say whether the fused kernels compute such a layer: rotated attention, and a gated block with SiLU or experts."""
    mixer, feed_forward = traits.mixer, traits.feed_forward
    if not (isinstance(mixer, AttentionShape) and isinstance(feed_forward, GatedShape | MixtureShape)):
        return False
    return (
        mixer.scale is None
        and mixer.chunk_size is None
        and mixer.soft_cap is None
        and mixer.query_growth is None
        and mixer.reads_layer is None
        and mixer.value_dim is None
        and mixer.rotary is not None
        and not mixer.sees_later
        and mixer.head_norm not in (HeadNorm.WHOLE, HeadNorm.ROTATED)
        and not (mixer.has_sinks or mixer.output_gate or mixer.value_norm)
        and (
            _can_pack_mixture(feed_forward) if isinstance(feed_forward, MixtureShape) else _can_pack_gated(feed_forward)
        )
    )


def _can_pack_gated(shape: GatedShape) -> bool:
    return shape.activation is Activation.SILU


def _can_pack_mixture(shape: MixtureShape) -> bool:
    is_even = shape.expert_size % 2 == 0
    return (
        shape.num_experts <= MAX_EXPERTS
        and is_even
        and shape.shared_size == 0
        and not shape.weighs_inputs
        and shape.scales is None
        and shape.rule.score != "sparse_mixer"
        and shape.latent_size == 0
        and isinstance(shape.activation, GatedActivation)
    )


@dataclass(frozen=True, slots=True)
class LayerPacking:
    """How matrices are packed: dense ones, and those of forms that the kernel does not know, in the model's type."""

    library: CpuLibrary
    dtype: torch.dtype

    def pack(self, weights: LayerWeights) -> StackLayer:
        """Pack the matrices of a layer that `can_pack` lets pass, and make the others float32."""
        mixer, feed_forward = weights.mixer, weights.feed_forward
        assert isinstance(mixer, AttentionWeights)
        before_feed_forward = _plain(weights.norms.before_feed_forward)
        assert before_feed_forward is not None
        head_norm = mixer.head_norm
        return StackLayer(
            attention_norm=_plain(weights.norms.before_mixer),
            qkv=self._parts(mixer.qkv),
            output=self.matrix(mixer.output),
            mlp_norm=before_feed_forward,
            gate_up=self._parts(feed_forward.gate_up, is_gated=True) if isinstance(feed_forward, GatedWeights) else (),
            down=self.matrix(feed_forward.down) if isinstance(feed_forward, GatedWeights) else None,
            mixture=self._mixture(feed_forward) if isinstance(feed_forward, MixtureWeights) else None,
            query_norm=None if head_norm is None else head_norm.query.float(),
            key_norm=None if head_norm is None else head_norm.key.float(),
            sliding_window=mixer.shape.sliding_window,
        )

    def _mixture(self, weights: MixtureWeights) -> CpuMixture:
        assert isinstance(weights.activation, GatedActivation)
        router = self.matrix(weights.router)
        return make_cpu_mixture(
            self.library, router, weights.rule, weights.gate_up, weights.down, weights.activation, self.dtype
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


def _plain(norm: NormWeights | None) -> torch.Tensor | None:
    if norm is None:
        return None
    assert norm.is_plain
    return norm.weight.float()
