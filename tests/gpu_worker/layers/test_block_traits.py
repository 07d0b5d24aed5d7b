"""Which layers the fused kernels of a CPU can compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_worker.layers.block_traits import BlockTraits


@pytest.mark.parametrize(
    ("changes", "is_fusable"),
    [
        ({}, True),
        ({"logit_scale": 2.0, "logit_soft_cap": 30.0, "has_final_norm": False}, True),
        ({"residual_scale": 2.0}, False),
        ({"embedding_scale": 2.0}, False),
        ({"is_parallel": True}, False),
        ({"positions": object()}, False),
        ({"embeddings": object()}, False),
        ({"layer_inputs": object()}, False),
    ],
)
def test_layers_are_fused_whatever_the_scores_are_multiplied_by(changes: dict[str, Any], is_fusable: bool) -> None:
    assert replace(BlockTraits(), **changes).is_fusable is is_fusable


@pytest.mark.parametrize("change", [{"is_centered": True}, {"has_bias": True}])
def test_layers_of_another_normalisation_are_not_fused(change: dict[str, bool]) -> None:
    block = BlockTraits()
    assert not replace(block, norm=replace(block.norm, **change)).is_fusable
