"""From a layer's weights to what the fused kernels of a CPU read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.layers.attention import AttentionShape, AttentionWeights, HeadNorm
from gpu_worker.layers.layer import LayerTraits, LayerWeights
from gpu_worker.layers.linear import Projection, adapter_tables, expert_tables
from gpu_worker.layers.mixture import MixtureShape, MixtureWeights
from gpu_worker.layers.mlp import GatedShape, GatedWeights
from gpu_worker.layers.norms import NormWeights
from kernels.activation.experts import GatedActivation
from kernels.cpu_library import CpuLibrary
from kernels.decoder_stack import LayerAdapters, StackLayer
from kernels.linear.forms import SplitWeight
from kernels.linear.panels import PanelMatrix, pack_panels
from kernels.low_rank.cpu import CpuAdapterTable
from kernels.moe.cpu import MAX_EXPERTS, CpuMixture, can_route_by, make_cpu_mixture

# Fields whose every value the kernels compute, or that are settled when weights are read. Any other field, such as one
# that is added later, must have its default: no layer of an unknown form is packed as if it were a plain one.
_ATTENTION_FIELDS = frozenset(
    {"num_heads", "num_kv_heads", "head_dim", "sliding_window", "rotary", "rotary_dim", "interleaved", "head_norm"}
    | {"qkv_bias", "output_bias", "output_scale", "values_are_keys", "by_head"}
)
_GATED_FIELDS = frozenset({"inner_size", "has_bias", "gate_scale", "down_scale"})
_MIXTURE_FIELDS = frozenset(
    {"num_experts", "expert_size", "rule", "names", "activation", "has_router_bias", "has_choice_bias"}
    | {"has_expert_biases", "shared_scale", "has_shared_biases", "has_shared_gate"}
)
_HEAD_NORMS = (HeadNorm.NONE, HeadNorm.HEADS, HeadNorm.UNWEIGHTED)


def can_pack(traits: LayerTraits) -> bool:
    """Return whether the fused kernels support a layer: rotated attention, and a gated SiLU block or experts."""
    mixer, feed_forward = traits.mixer, traits.feed_forward
    if not (isinstance(mixer, AttentionShape) and _is_plain_but_for(_ATTENTION_FIELDS, mixer)):
        return False
    if mixer.rotary is None or mixer.head_norm not in _HEAD_NORMS:
        return False
    if isinstance(feed_forward, GatedShape):
        return _is_plain_but_for(_GATED_FIELDS, feed_forward)
    return isinstance(feed_forward, MixtureShape) and _can_pack_mixture(feed_forward)


def _can_pack_mixture(shape: MixtureShape) -> bool:
    return (
        _is_plain_but_for(_MIXTURE_FIELDS, shape)
        and shape.num_experts <= MAX_EXPERTS
        and shape.expert_size % 2 == 0
        and can_route_by(shape.rule)
        and isinstance(shape.activation, GatedActivation)
    )


def _is_plain_but_for(names: frozenset[str], shape: AttentionShape | GatedShape | MixtureShape) -> bool:
    return all(field.name in names or getattr(shape, field.name) == field.default for field in fields(shape))


@dataclass(frozen=True, slots=True)
class LayerPacking:
    """How matrices are packed: dense ones, and those of forms that the kernel does not know, in the model's type."""

    library: CpuLibrary
    dtype: torch.dtype
    adapters: AdapterTargets | None = None

    def pack(self, weights: LayerWeights) -> StackLayer:
        """Pack the matrices of a layer that `can_pack` lets pass, and make the others float32."""
        mixer, feed_forward = weights.mixer, weights.feed_forward
        assert isinstance(mixer, AttentionWeights)
        before_feed_forward = _plain(weights.norms.before_feed_forward)
        assert before_feed_forward is not None
        head_norm, adapters = mixer.head_norm, LayerAdapters(self._tables(mixer.qkv))
        if adapters.qkv:
            adapters = replace(
                adapters, output=self._tables(mixer.output)[0], **self._feed_forward_tables(feed_forward)
            )
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
            adapters=adapters,
        )

    def _feed_forward_tables(self, weights: object) -> dict[str, Any]:
        if isinstance(weights, GatedWeights):
            return {"gate_up": self._tables(weights.gate_up, is_gated=True), "down": self._tables(weights.down)[0]}
        return {"router": self._tables(weights.router)[0]} if isinstance(weights, MixtureWeights) else {}

    def _tables(self, projection: Projection, *, is_gated: bool = False) -> list[int]:
        form = projection.weight
        is_split = isinstance(form, SplitWeight)
        rows = tuple(part.shape[0] for part in form.parts) if isinstance(form, SplitWeight) else ()
        tables = adapter_tables(self.adapters, projection, rows, is_gated=is_gated and not is_split)
        return [table.address for table in tables if isinstance(table, CpuAdapterTable)]

    def _mixture(self, weights: MixtureWeights) -> CpuMixture:
        assert isinstance(weights.activation, GatedActivation)
        router = self.matrix(weights.router)
        made = make_cpu_mixture(
            self.library, router, weights.rule, weights.gate_up, weights.down, weights.activation, self.dtype
        )
        if self.adapters is not None and weights.modules is not None:
            tables = expert_tables(self.adapters, weights.modules, is_gated=made.experts.packs_gates)
            made.experts.have_adapters(*tables)
        return made

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
