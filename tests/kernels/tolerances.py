"""How close a kernel's result must be to its reference's."""

from __future__ import annotations

import torch

from kernels.linear.rounding import InputRounding, RoundedRows

# Some roundings of a value of up to 4, and of the values it was summed from.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare on the CPU; a NaN on either side fails."""
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.cpu(), expected.cpu(), atol=tolerance, rtol=tolerance, equal_nan=False)


_GIVEN = torch.tensor(0.02)
ROUNDINGS = {
    "int8": InputRounding(torch.int8),
    "int8_static": InputRounding(torch.int8, _GIVEN),
    "fp8": InputRounding(torch.float8_e4m3fn),
    "fp8_static": InputRounding(torch.float8_e4m3fn, _GIVEN),
    "fp8_blocks": InputRounding(torch.float8_e4m3fn, has_blocks=True),
}


def assert_same_rounded(actual: RoundedRows, expected: RoundedRows) -> None:
    """Check that both have the same bits and are laid out alike; rows of padding mean nothing."""
    num_rows = len(expected)
    assert (len(actual), actual.dtype) == (num_rows, expected.dtype)
    assert (actual.values.shape, actual.scales.stride()) == (expected.values.shape, expected.scales.stride())
    assert torch.equal(actual.values[:num_rows].view(torch.int8), expected.values[:num_rows].view(torch.int8))
    assert torch.equal(actual.scales[:num_rows], expected.scales[:num_rows])
