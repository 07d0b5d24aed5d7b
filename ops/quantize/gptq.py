"""GPTQ: round a matrix column by column, and let the columns that follow make up for each one's error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv 2210.17323, algorithm 1 with lazy batches of columns. Columns are taken in order of falling input energy
("act-order"), but each keeps the grid of its own group in the matrix as it was: the stored groups stay in order, and no
reader has to permute anything.
"""

from __future__ import annotations

import torch

from ops.quantize.grid import GroupGrid, QuantizedMatrix, fit_grid
from shared.errors import HeadraceError

_BATCH_COLUMNS = 128
_MAX_DAMPING_STEPS = 6


class SingularGramError(HeadraceError):
    """The inputs' second moments cannot be factored even with strong damping."""

    def __init__(self) -> None:
        super().__init__(
            "the calibration inputs of a layer hold no usable second moments (NaN or infinity); "
            "use another calibration text, or the model's weights are damaged"
        )


def gptq(
    weight: torch.Tensor, gram: torch.Tensor, bits: int, group_size: int, damping: float = 0.01
) -> QuantizedMatrix:
    """Quantize a matrix so that its product with the calibration inputs changes little.

    `damping` is added to the diagonal of `gram`, as a share of its mean.

    Shapes:
        weight: `[out_features, in_features]` float32
        gram: `[in_features, in_features]` float32: `inputs.T @ inputs` over the calibration tokens, up to a factor

    Raises:
        SingularGramError: `gram` is not finite.
    """
    grid = fit_grid(weight, bits, group_size)
    energy = gram.diagonal()
    order = energy.argsort(descending=True)
    factor = _inverse_factor(gram[order][:, order], damping)
    # A feature that never occurs weighs nothing: its column may as well be zero, which every grid has.
    left = weight.masked_fill(energy == 0, 0.0)[:, order]
    values = torch.empty_like(left)
    for first in range(0, left.shape[1], _BATCH_COLUMNS):
        last = min(first + _BATCH_COLUMNS, left.shape[1])
        columns = order[first:last]
        batch = factor[first:last, first:last]
        values[:, first:last], errors = _round_columns(left[:, first:last], batch, grid, columns)
        left[:, last:] -= errors @ factor[first:last, last:]
    in_place = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    in_place[:, order] = values.to(torch.uint8)
    return QuantizedMatrix(grid, in_place)


def _round_columns(
    left: torch.Tensor, factor: torch.Tensor, grid: GroupGrid, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a batch of columns one after another, each correcting those after it; return values and scaled errors."""
    scales = grid.scales[:, columns // grid.group_size].T.contiguous()
    rows = left.T.contiguous()
    values, errors = torch.empty_like(rows), torch.empty_like(rows)
    top = 2**grid.bits - 1
    for index in range(len(rows)):
        value = (rows[index] / scales[index]).round_().add_(grid.zero).clamp_(0, top)
        level = (value - grid.zero) * scales[index]
        error = (rows[index] - level) / factor[index, index]
        rows[index:].addr_(factor[index, index:], error, alpha=-1.0)
        values[index], errors[index] = value, error
    return values.T, errors.T


def _inverse_factor(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper triangular `U` with `U.T @ U` the inverse of the damped matrix, damped as much as it takes."""
    gram = gram.clone()
    diagonal = gram.diagonal()
    diagonal[diagonal == 0] = 1.0
    step = damping * diagonal.mean()
    for _ in range(_MAX_DAMPING_STEPS):
        diagonal += step
        lower, failure = torch.linalg.cholesky_ex(gram)
        if not failure and lower.isfinite().all():
            upper, failure = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failure:
                return torch.as_tensor(upper)
        step *= 10
    raise SingularGramError
