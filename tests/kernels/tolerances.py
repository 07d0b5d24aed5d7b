"""How close a kernel's result must be to its reference's."""

from __future__ import annotations

import torch

# Some roundings of a value of up to 4, and of the values it was summed from.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare on the CPU; a NaN on either side fails."""
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.cpu(), expected.cpu(), atol=tolerance, rtol=tolerance, equal_nan=False)
