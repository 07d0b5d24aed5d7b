from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gated_delta import DeltaSizes
from kernels.gated_delta.triton_kernel import gated_delta_triton
from kernels.gpu_config import Gpu, GpuGeneration
from kernels.ssd import SsdSizes
from kernels.ssd.triton_kernel import ssd_triton
from tests.kernels.matrix_state.rules import DELTA, SSD, Rule, Sizes, inputs_of, pool_of
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.state_batches import state_rows
from tests.kernels.tolerances import assert_close

HOPPER, ADA = (Gpu(GpuGeneration[name], 100) for name in ("HOPPER", "ADA"))
FORMS = {str(DELTA): gated_delta_triton, str(SSD): ssd_triton}


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [3, 2, 1, 1], [1, 40, 2, 1]], ids=str)
@pytest.mark.parametrize(
    ("rule", "sizes", "dtype", "gpu"),
    [
        (DELTA, DeltaSizes(1, 2, 20, 37), torch.float32, HOPPER),
        (SSD, SsdSizes(4, 37, 2, 20), torch.float32, HOPPER),
        pytest.param(DELTA, DeltaSizes(1, 1, 1, 1), torch.float32, ADA, marks=pytest.mark.slow),
        pytest.param(SSD, SsdSizes(1, 1, 1, 1), torch.float32, ADA, marks=pytest.mark.slow),
        pytest.param(DELTA, DeltaSizes(1, 2, 256, 33), torch.float32, HOPPER, marks=pytest.mark.slow),
        pytest.param(SSD, SsdSizes(2, 33, 1, 256), torch.float32, HOPPER, marks=pytest.mark.slow),
        pytest.param(DELTA, DeltaSizes(1, 1, 128, 128), torch.float16, ADA, marks=pytest.mark.slow),
        pytest.param(SSD, SsdSizes(1, 64, 1, 128), torch.float16, ADA, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_equal_reference(
    rule: Rule, sizes: Sizes, dtype: torch.dtype, gpu: Gpu, lengths: list[int], device: torch.device
) -> None:
    inputs, states = inputs_of(sizes, sum(lengths), dtype).to(device), pool_of(sizes, 9).to(device)
    theirs = states.clone()
    kept = max(1, lengths[1] - 3)
    saves = [[(1, 6)], [(1, 7), (kept, 8)] if kept > 1 else [(1, 7)], [], []]
    rows = state_rows(lengths, [0, 7, 1, -1], [4, 0, 2, 5], [1, kept, 0, 0], device, saves)
    with poisoned_memory():
        result = inputs.run(partial(FORMS[str(rule)], gpu=gpu), states, rows)
    expected = inputs.run(rule.reference, theirs, rows)
    assert_close(result[:-1], expected[:-1])
    torch.testing.assert_close(states, theirs, rtol=1e-5, atol=1e-5)


def test_bad_sequence_leaves_its_neighbour_in_a_chunk_alone(device: torch.device) -> None:
    """NaN in keys or gates of one sequence, in the chunk in which another begins."""
    sizes, lengths = DeltaSizes(1, 2, 20, 37), [21, 23]
    inputs, states = inputs_of(sizes, sum(lengths), torch.float32).to(device), pool_of(sizes, 2).to(device)
    rows = state_rows(lengths, [4, 4], [0, 1], device=device)
    clean = states.clone()
    expected = inputs.run(partial(gated_delta_triton, gpu=HOPPER), clean, rows)
    inputs.features[18], inputs.gates[19] = float("nan"), float("nan")
    actual = inputs.run(partial(gated_delta_triton, gpu=HOPPER), states, rows)
    assert actual[18:21].isnan().any()
    assert torch.equal(actual[21:], expected[21:])
    assert torch.equal(states[1], clean[1])
