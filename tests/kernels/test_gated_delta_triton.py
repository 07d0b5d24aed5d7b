from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gated_delta import DeltaSizes, DeltaWeights
from kernels.gated_delta.reference import gated_delta_reference
from kernels.gated_delta.triton_kernel import gated_delta_triton
from kernels.gpu_config import Gpu, GpuGeneration
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.state_batches import state_rows
from tests.kernels.test_gated_delta import inputs_of, pool_of
from tests.kernels.tolerances import assert_close

HOPPER, ADA = (Gpu(GpuGeneration[name], 100) for name in ("HOPPER", "ADA"))


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [3, 2, 1, 1], [1, 40, 2, 1]], ids=str)
@pytest.mark.parametrize(
    ("sizes", "dtype", "gpu"),
    [
        (DeltaSizes(1, 1, 1, 1), torch.float32, ADA),
        (DeltaSizes(1, 2, 20, 37), torch.float32, HOPPER),
        (DeltaSizes(1, 1, 128, 128), torch.float16, ADA),
    ],
    ids=str,
)
def test_kernels_equal_reference(
    sizes: DeltaSizes, dtype: torch.dtype, gpu: Gpu, lengths: list[int], device: torch.device
) -> None:
    qkv, gates, weights = inputs_of(sizes, sum(lengths), dtype)
    qkv, gates = qkv.to(device), gates.to(device)
    weights = DeltaWeights(weights.rate.to(device), weights.step_bias.to(device))
    states = pool_of(sizes, 9).to(device)
    theirs = states.clone()
    kept = max(1, lengths[1] - 3)
    saves = [[(1, 6)], [(1, 7), (kept, 8)] if kept > 1 else [(1, 7)], [], []]
    rows = state_rows(lengths, [0, 7, 1, -1], [4, 0, 2, 5], [1, kept, 0, 0], device, saves)
    with poisoned_memory():
        result = gated_delta_triton(qkv, gates, weights, sizes, states, rows, gpu)
    expected = gated_delta_reference(qkv, gates, weights, sizes, theirs, rows)
    assert_close(result[:-1], expected[:-1])
    torch.testing.assert_close(states, theirs, rtol=1e-5, atol=1e-5)
