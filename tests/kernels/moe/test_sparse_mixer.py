"""The sparse mixer against that of `transformers`."""

from __future__ import annotations

import pytest
import torch

from kernels.moe import RoutingRule, route


@pytest.mark.parametrize("jitter", [0.01, 0.4])
def test_choice_and_weights_equal_transformers(jitter: float) -> None:
    modeling = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(1))
    logits[0] = 0
    ids, weights = route(logits, RoutingRule(2, score="sparse_mixer", jitter=jitter, scale=2.0))
    expected_weights, expected_ids = modeling.sparsemixer(logits, jitter, training=False)
    assert ids.dtype is torch.int32
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, 2 * expected_weights)
    assert (weights < 2).any()
