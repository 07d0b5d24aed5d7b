"""Tests for what mixtures of experts refuse of a configuration."""

from __future__ import annotations

import pytest

from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.families import families
from gpu_worker.models.support_page import sample_config
from kernels.activation.experts import SILU


def mixtures(architecture: str) -> list[MixtureShape]:
    layers = sample_config(architecture).layers
    return [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MixtureShape)]


ALL = [family.architecture for family in families()]
WITH_SILU = [name for name in ALL if any(shape.activation == SILU for shape in mixtures(name))]


def test_most_families_with_experts_have_silu() -> None:
    assert len(WITH_SILU) >= 10


@pytest.mark.parametrize("architecture", WITH_SILU)
def test_other_activations_of_experts_are_refused(architecture: str) -> None:
    with pytest.raises(CheckpointError, match=r"field 'hidden_act' is 'gelu'.*'silu'"):
        sample_config(architecture, hidden_act="gelu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 5}, "field 'n_group' is 5; it must divide"),
        ({"n_group": 2, "topk_group": 3}, "field 'topk_group' is 3; there are 2 groups"),
        ({"n_group": 8, "topk_group": 1}, "field 'num_experts_per_tok' is 4; .* have 2 experts"),
    ],
)
@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_groups_of_experts_that_cannot_be_are_refused(architecture: str, fields: dict[str, int], message: str) -> None:
    fields = {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, **fields}
    with pytest.raises(CheckpointError, match=message):
        sample_config(architecture, topk_method="group_limited_greedy", **fields)
