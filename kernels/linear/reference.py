"""Linear layers on every form of weights in plain torch: the oracle of the kernels."""

from __future__ import annotations

import torch

from kernels.linear.forms import SCALE_BLOCK, ScaledWeight, WeightForm

_INT8_MAX = 127
_FLOAT8_MAX = 448.0
# A row of zeros must not be divided by zero.
_MIN_SCALE = 1e-12


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Multiply rows by a plain matrix, and add the bias, in fp32, rounded once."""
    result = x.float() @ weight.float().T
    if bias is not None:
        result += bias.float()
    return result if to_float32 else result.to(x.dtype)


def form_linear_reference(
    x: torch.Tensor, form: WeightForm, bias: torch.Tensor | None = None, *, to_float32: bool = False
) -> torch.Tensor:
    """Multiply rows by a matrix in any form, and add the bias, in fp32, rounded once.

    Where inputs are not rounded, the matrix is, to the type of `x`. Where they are, each row, or a block of it, is
    rounded to numbers of the weights' kind times its scale: its largest magnitude divided by the kind's largest number,
    or the scale that is given. Sums of products of integers are exact.
    """
    if not isinstance(form, ScaledWeight) or form.activation == "none":
        return linear_reference(x, form.dequantize().to(x.dtype), bias, to_float32=to_float32)
    if form.values.dtype is torch.int8 and form.has_row_scales:
        values, scales = quantize_tokens(x, form.activation_scale)
        # Exact in float64, as they are in int32.
        sums = values.double() @ form.values.double().T
        result = sums.float() * scales * form.scales.T
    else:
        result = round_inputs(x, form) @ form.dequantize().T
    if bias is not None:
        result += bias.float()
    return result if to_float32 else result.to(x.dtype)


def round_inputs(x: torch.Tensor, form: ScaledWeight) -> torch.Tensor:
    """Return what inputs are rounded to by a form that rounds them, in float32.

    Shapes:
        x, result: `[num_rows, in_features]`
    """
    block = x.shape[1] if form.has_row_scales else SCALE_BLOCK
    parts = [x[:, first : first + block].float() for first in range(0, x.shape[1], block)]
    if form.values.dtype is torch.int8:
        pairs = [quantize_tokens(part, form.activation_scale) for part in parts]
        return torch.cat([values.float() * scales for values, scales in pairs], dim=1)
    return torch.cat([_round_to_float8(part, form.activation_scale) for part in parts], dim=1)


def quantize_tokens(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to int8, with a scale each or with the one that is given.

    Shapes:
        x, values: `[num_rows, num_columns]`
        scale: `[]`
        scales: `[num_rows, 1]`, or as `scale`
    """
    rows = x.float()
    scales = _token_scales(rows, _INT8_MAX) if scale is None else scale
    return (rows / scales).round().clamp(-_INT8_MAX - 1, _INT8_MAX).to(torch.int8), scales


def _round_to_float8(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    scales = _token_scales(rows, _FLOAT8_MAX) if scale is None else scale
    return (rows / scales).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn).float() * scales


def _token_scales(rows: torch.Tensor, largest: float) -> torch.Tensor:
    return (rows.abs().amax(dim=1, keepdim=True) / largest).clamp(min=_MIN_SCALE)
