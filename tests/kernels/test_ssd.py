"""Mamba-2's state update against `transformers`; `matrix_state/test_rules.py` has what all rules have in common."""

from __future__ import annotations

import pytest
import torch

from kernels.ssd import SsdSizes, SsdWeights
from kernels.ssd.reference import ssd_reference
from tests.kernels.matrix_state.rules import SSD, inputs_of
from tests.kernels.state_batches import state_rows


@pytest.mark.parametrize("sizes", SSD.sizes, ids=str)
def test_reference_equals_transformers(sizes: SsdSizes) -> None:
    from transformers.models.falcon_h1.modeling_falcon_h1 import mamba2_chunk_scan as oracle

    inputs = inputs_of(sizes, 9)
    features, weights = inputs.features, inputs.weights
    assert isinstance(weights, SsdWeights)
    value, *groups = features[None].split([sizes.inner_size, *[sizes.num_groups * sizes.state_size] * 2], dim=2)
    state_input, output = (part.reshape(1, 9, sizes.num_groups, -1) for part in groups)
    expected, state = oracle(
        value.reshape(1, 9, sizes.num_heads, -1),
        inputs.gates[None],
        -weights.rate,
        state_input,
        output,
        4,
        D=weights.skip,
        dt_bias=weights.step_bias,
        dt_softplus=True,
        dt_limit=(weights.min_step, weights.max_step),
        return_final_states=True,
    )
    states = torch.full((1, *sizes.state_shape), float("nan"))
    result = inputs.run(ssd_reference, states, state_rows([9], [0], [0]))
    torch.testing.assert_close(result, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, state.transpose(2, 3), rtol=1e-5, atol=1e-5)
