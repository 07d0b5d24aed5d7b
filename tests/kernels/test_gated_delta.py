"""The gated delta rule against `transformers`; `matrix_state/test_rules.py` has what all rules have in common."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.gated_delta import DeltaSizes, DeltaWeights
from kernels.gated_delta.reference import gated_delta_reference
from tests.kernels.matrix_state.rules import DELTA, inputs_of
from tests.kernels.state_batches import state_rows


@pytest.mark.parametrize("sizes", DELTA.sizes, ids=str)
def test_reference_equals_transformers(sizes: DeltaSizes) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as oracle

    inputs = inputs_of(sizes, 9)
    qkv, weights = inputs.features, inputs.weights
    assert isinstance(weights, DeltaWeights)
    keys = sizes.num_key_heads * sizes.key_dim
    query, key = (part.reshape(1, 9, -1, sizes.key_dim) for part in qkv[:, : 2 * keys].chunk(2, dim=1))
    value = qkv[:, 2 * keys :].reshape(1, 9, -1, sizes.value_dim)
    strength, step = inputs.gates[None].chunk(2, dim=2)
    decay = -weights.rate * functional.softplus(step + weights.step_bias)
    expected, state = oracle(
        query, key, value, decay, strength.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    states = torch.full((1, *sizes.state_shape), float("nan"))
    result = inputs.run(gated_delta_reference, states, state_rows([9], [0], [0]))
    torch.testing.assert_close(result, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, state, rtol=1e-5, atol=1e-5)
