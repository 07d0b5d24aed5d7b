"""Which layers the fused kernels take: those of known forms, and no others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.layer_packing import can_pack
from gpu_worker.layers.layer_source import Projections
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape, PlainShape
from gpu_worker.models.errors import CheckpointError
from kernels.activation import Activation
from kernels.activation.experts import RELU_SQUARED
from kernels.moe import RoutingRule

ATTENTION = AttentionShape(4, 2, 16)
GATED = GatedShape(64)
MIXTURE = MixtureShape(8, 32, RoutingRule(2))


@dataclass(frozen=True, slots=True)
class LaterAttention(AttentionShape):
    """A form of attention that was added after the kernels were written."""

    forgets: float = 0.0


@dataclass(frozen=True, slots=True)
class LaterBlock(GatedShape):
    """The same of a feed-forward block."""

    bend: float = 0.0


@pytest.mark.parametrize(
    "traits",
    [
        LayerTraits(ATTENTION, GATED),
        LayerTraits(ATTENTION, MIXTURE),
        LayerTraits(replace(ATTENTION, sliding_window=9, head_norm=HeadNorm.HEADS, qkv_bias=True, by_head=True), GATED),
        LayerTraits(ATTENTION, replace(GATED, has_bias=True, gate_scale=2.0, down_scale=0.5)),
        LayerTraits(ATTENTION, replace(MIXTURE, has_choice_bias=True, rule=RoutingRule(2, score="sigmoid", scale=2.5))),
        LayerTraits(LaterAttention(4, 2, 16), LaterBlock(64)),
    ],
)
def test_known_layer_is_packed(traits: LayerTraits) -> None:
    assert can_pack(traits)


@pytest.mark.parametrize(
    "traits",
    [
        LayerTraits(replace(ATTENTION, rotary=None), GATED),
        LayerTraits(replace(ATTENTION, scale=0.1), GATED),
        LayerTraits(replace(ATTENTION, sees_later=True), GATED),
        LayerTraits(replace(ATTENTION, head_norm=HeadNorm.ROTATED), GATED),
        LayerTraits(ATTENTION, replace(GATED, activation=Activation.GELU_TANH)),
        LayerTraits(ATTENTION, PlainShape(64, Activation.SILU)),
        LayerTraits(ATTENTION, replace(MIXTURE, expert_size=33)),
        LayerTraits(ATTENTION, replace(MIXTURE, shared_size=32)),
        LayerTraits(ATTENTION, replace(MIXTURE, activation=RELU_SQUARED)),
        LayerTraits(ATTENTION, replace(MIXTURE, rule=RoutingRule(2, score="sparse_mixer"))),
        LayerTraits(None, GATED),
        LayerTraits(ATTENTION, None),
    ],
)
def test_layer_that_the_kernels_do_not_compute_is_not_packed(traits: LayerTraits) -> None:
    assert not can_pack(traits)


@pytest.mark.parametrize(
    "traits",
    [LayerTraits(LaterAttention(4, 2, 16, forgets=0.5), GATED), LayerTraits(ATTENTION, LaterBlock(64, bend=0.5))],
)
def test_layer_of_a_form_that_nobody_has_named_is_not_packed(traits: LayerTraits) -> None:
    assert not can_pack(traits)


class Empty:
    """A checkpoint without a tensor of such a size."""

    def take_rows(self, names: list[str], shapes: list[tuple[int, ...]]) -> Any:
        raise CheckpointError(Path("model.safetensors"), f"{names[0]} is not {shapes[0]}")


def test_factors_of_features_that_a_checkpoint_does_not_have_are_not_made() -> None:
    width = 1 << 48
    projections = Projections(Empty())  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="up_proj"):
        projections.take(["up_proj"], [width], 64, scales=[(width, 0.5)])
