from __future__ import annotations

import pytest
import torch

from ops.quantize.gptq import SingularGramError, _inverse_factor, gptq
from ops.quantize.grid import GroupGrid, fit_grid, round_to_nearest
from tests.ops.quantize.layer_models import correlated_inputs


def optimal_brain_quantization(
    weight: torch.Tensor, gram: torch.Tensor, grid: GroupGrid, order: list[int]
) -> torch.Tensor:
    """The update that GPTQ restates, equations 2 and 3 of its paper, with the inverse anew for every column."""
    left, rounded = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    for position, column in enumerate(order):
        remaining = order[position:]
        inverse = torch.linalg.inv(gram.double()[remaining][:, remaining])
        group = column // grid.group_size
        scale, zero = grid.scales[:, group].double(), 8
        rounded[:, column] = ((left[:, column] / scale).round() + zero).clamp(0, 15).sub(zero) * scale
        error = (left[:, column] - rounded[:, column]) / inverse[0, 0]
        left[:, remaining] -= error[:, None] * inverse[0]
    return rounded


def output_error(weight: torch.Tensor, rounded: torch.Tensor, inputs: torch.Tensor) -> float:
    return float(((weight - rounded) @ inputs.T).square().sum())


def test_feature_that_never_occurs_counts_as_one_of_energy_one() -> None:
    factor = _inverse_factor(torch.diag(torch.tensor([4.0, 0.0])), 0.1)
    # A tenth of their mean, 2.5, is added to both.
    torch.testing.assert_close(factor.T @ factor, torch.diag(torch.tensor([1 / 4.25, 1 / 1.25])))


@pytest.mark.parametrize("num_inputs", [64, 160])
def test_equals_the_update_of_the_paper(num_inputs: int) -> None:
    inputs = correlated_inputs(300, num_inputs)
    weight = torch.randn(10, num_inputs, generator=torch.Generator().manual_seed(1))
    gram = inputs.T @ inputs
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(num_inputs)
    order = gram.diagonal().argsort(descending=True).tolist()
    grid = fit_grid(weight, 4, 32)

    matrix = gptq(weight, gram, 4, 32)

    expected = optimal_brain_quantization(weight, damped, grid, order)
    # A weight within rounding of the middle between two levels may fall to either side, and move those after it.
    assert ((matrix.dequantize() - expected).abs() > 1e-4).double().mean() < 0.02
    assert output_error(weight, matrix.dequantize(), inputs) == pytest.approx(
        output_error(weight, expected.float(), inputs), rel=0.02
    )


@pytest.mark.parametrize("num_inputs", [64, 320])
def test_outputs_change_far_less_than_by_rounding_to_nearest(num_inputs: int) -> None:
    inputs = correlated_inputs(1000, num_inputs)
    weight = torch.randn(48, num_inputs, generator=torch.Generator().manual_seed(2))

    better = gptq(weight, inputs.T @ inputs, 4, 64).dequantize()

    nearest = round_to_nearest(weight, 4, 64).dequantize()
    assert output_error(weight, better, inputs) < 0.5 * output_error(weight, nearest, inputs)


def test_independent_inputs_gain_nothing() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))

    matrix = gptq(weight, torch.eye(64), 4, 32)

    assert torch.equal(matrix.values, round_to_nearest(weight, 4, 32).values)


def test_features_that_never_occur_are_rounded_to_zero_and_harm_nobody() -> None:
    inputs = correlated_inputs(300, 64)
    inputs[:, [0, 40]] = 0
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(6))

    rounded = gptq(weight, inputs.T @ inputs, 4, 32).dequantize()

    assert not rounded[:, [0, 40]].any()
    assert rounded.isfinite().all()


@pytest.mark.parametrize("negative_share", [0.0, 0.3])
def test_fewer_tokens_than_features_are_damped_as_much_as_it_takes(negative_share: float) -> None:
    inputs = correlated_inputs(5, 64)
    gram = inputs.T @ inputs
    gram -= negative_share * gram.diagonal().mean() * torch.eye(64)

    rounded = gptq(torch.randn(6, 64), gram, 4, 32).dequantize()

    assert rounded.isfinite().all()


def test_inputs_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(SingularGramError, match="calibration"):
        gptq(torch.randn(4, 32), torch.full((32, 32), float("nan")), 4, 32)
