from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.ssd import SsdSizes
from kernels.ssd.reference import ssd_reference
from kernels.ssd.triton_kernel import ssd_triton
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.state_batches import state_rows
from tests.kernels.test_ssd import inputs_of, pool_of
from tests.kernels.tolerances import assert_close

HOPPER, ADA = (Gpu(GpuGeneration[name], 100) for name in ("HOPPER", "ADA"))


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [3, 2, 1, 1], [1, 40, 2, 1]], ids=str)
@pytest.mark.parametrize(
    ("sizes", "dtype", "gpu"),
    [
        (SsdSizes(4, 37, 2, 20), torch.float32, HOPPER),
        pytest.param(SsdSizes(1, 1, 1, 1), torch.float32, ADA, marks=pytest.mark.slow),
        pytest.param(SsdSizes(2, 33, 1, 256), torch.float32, HOPPER, marks=pytest.mark.slow),
        pytest.param(SsdSizes(1, 64, 1, 128), torch.float16, ADA, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_equal_reference(
    sizes: SsdSizes, dtype: torch.dtype, gpu: Gpu, lengths: list[int], device: torch.device
) -> None:
    features, steps, weights = inputs_of(sizes, sum(lengths), dtype)
    features, steps = features.to(device), steps.to(device)
    of_heads = (weights.rate, weights.step_bias, weights.skip)
    rate, step_bias, skip = (tensor.to(device) for tensor in of_heads)
    weights = dataclasses.replace(weights, rate=rate, step_bias=step_bias, skip=skip)
    states = pool_of(sizes, 9).to(device)
    theirs = states.clone()
    kept = max(1, lengths[1] - 3)
    saves = [[(1, 6)], [(1, 7), (kept, 8)] if kept > 1 else [(1, 7)], [], []]
    rows = state_rows(lengths, [0, 7, 1, -1], [4, 0, 2, 5], [1, kept, 0, 0], device, saves)
    with poisoned_memory():
        result = ssd_triton(features, steps, weights, sizes, states, rows, gpu)
    expected = ssd_reference(features, steps, weights, sizes, theirs, rows)
    assert_close(result[:-1], expected[:-1])
    torch.testing.assert_close(states, theirs, rtol=1e-5, atol=1e-5)
