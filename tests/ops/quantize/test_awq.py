from __future__ import annotations

import pytest
import torch

from gpu_worker.layers.layer import LayerWeights
from gpu_worker.layers.linear import Projection
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.registry import read_model_config
from ops.quantize import awq
from ops.quantize.awq import clip, rescale_layer, rounded, search_scales
from ops.quantize.layer_blocks import matrices, matrix_of
from ops.quantize.layer_inputs import LayerInputs
from ops.quantize.layer_pass import LayerPass
from tests.ops.quantize.layer_models import SIZES, correlated_inputs, save_model

MATRICES = ("qkv", "output", "gate_up", "down")


def output_error(weight: torch.Tensor, approximation: torch.Tensor, inputs: torch.Tensor) -> float:
    return float(((weight - approximation) @ inputs.T).square().sum())


def test_scales_protect_loud_features() -> None:
    inputs = correlated_inputs(500, 64)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))

    scales = search_scales([weight], inputs.T @ inputs, inputs.abs().mean(0), 4, 32)

    loud = torch.zeros(64, dtype=torch.bool)
    loud[::17] = True
    assert scales[loud].min() > scales[~loud].max()
    scaled = rounded(weight * scales, 4, 32).dequantize() / scales
    assert output_error(weight, scaled, inputs) < 0.6 * output_error(
        weight, rounded(weight, 4, 32).dequantize(), inputs
    )


def test_scales_of_some_rows_are_as_good_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = correlated_inputs(200, 64)
    weight = torch.randn(6100, 64, generator=torch.Generator().manual_seed(1))
    gram, magnitudes = inputs.T @ inputs, inputs.abs().mean(0)

    of_some = search_scales([weight], gram, magnitudes, 4, 32)
    monkeypatch.setattr(awq, "_MAX_SEARCH_ROWS", len(weight))
    of_all = search_scales([weight], gram, magnitudes, 4, 32)

    errors = [
        output_error(weight, rounded(weight * scales, 4, 32).dequantize() / scales, inputs)
        for scales in (of_some, of_all)
    ]
    assert errors[0] < 1.01 * errors[1]


def test_scales_are_shared_by_matrices_of_the_same_input() -> None:
    inputs = correlated_inputs(500, 64)
    one, other = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    gram, magnitudes = inputs.T @ inputs, inputs.abs().mean(0)

    together = search_scales([one, other], gram, magnitudes, 4, 32)

    assert torch.equal(together, search_scales([torch.cat((one, other))], gram, magnitudes, 4, 32))


def test_clipping_gives_up_a_weight_that_its_inputs_do_not_need() -> None:
    inputs = torch.randn(400, 32, generator=torch.Generator().manual_seed(2))
    inputs[:, 7] = 1e-3 * inputs[:, 7]
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    weight[:, 7] = 12.0

    clipped = clip(weight, inputs.T @ inputs, 4, 32)

    assert (clipped[:, 7] < 10).all()
    before, after = (rounded(matrix, 4, 32).dequantize() for matrix in (weight, clipped))
    assert output_error(weight, after, inputs) < 0.7 * output_error(weight, before, inputs)


def test_clipping_never_harms_a_group() -> None:
    inputs = correlated_inputs(300, 96)
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(3))

    clipped = clip(weight, inputs.T @ inputs, 4, 32)

    for first in range(0, 96, 32):
        group = slice(first, first + 32)
        before, after = (rounded(matrix[:, group], 4, 32).dequantize() for matrix in (weight, clipped))
        errors = [((weight[:, group] - part) @ inputs[:, group].T).square().sum(1) for part in (after, before)]
        assert (errors[0] <= errors[1] * 1.001).all()


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("has_biases", [False, True])
def test_a_rescaled_layer_computes_the_same(tmp_path, kv_heads: int, has_biases: bool) -> None:
    save_model(tmp_path, num_key_value_heads=kv_heads, attention_bias=has_biases, mlp_bias=has_biases)
    config = read_model_config(tmp_path)
    with Checkpoint(tmp_path, torch.float32, torch.device("cpu")) as checkpoint, torch.inference_mode():
        weights = config.take_layer(config.layer_source(checkpoint), 1)
    hidden = torch.randn(3, 20, SIZES["hidden_size"], generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        before = LayerPass(config, hidden.clone(), torch.device("cpu"))
        inputs = LayerInputs(**before.observe(1, weights, matrices(config.layer(1), config)))
        rescaled, moments = rescale_layer(weights, inputs, 4, 32)
        after = LayerPass(config, hidden.clone(), torch.device("cpu"))
        seen = LayerInputs(**after.observe(1, rescaled, matrices(config.layer(1), config)))
        before.advance(1, weights)
        after.advance(1, rescaled)

    torch.testing.assert_close(after.hidden, before.hidden, rtol=1e-4, atol=1e-4)
    assert scaled_matrices(weights, rescaled) == {"qkv", "gate_up", "down"} | ({"output"} if kv_heads == 4 else set())
    for name in MATRICES:
        torch.testing.assert_close(getattr(moments, name).gram, getattr(seen, name).gram, rtol=1e-3, atol=1e-2)


def scaled_matrices(before: LayerWeights, after: LayerWeights) -> set[str]:
    def inputs_differ(one: Projection, other: Projection) -> bool:
        # Rows may be scaled too, as sources of other matrices' inputs; only the columns' proportions tell.
        ratio = other.weight.dequantize()[0] / one.weight.dequantize()[0]
        return not torch.allclose(ratio, ratio[0], rtol=1e-3)

    return {name for name in MATRICES if inputs_differ(matrix_of(before, name), matrix_of(after, name))}
