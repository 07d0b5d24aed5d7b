from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.low_rank import AdapterRows
from kernels.low_rank.dispatch import low_rank_reference
from kernels.low_rank.triton_kernel import GpuAdapterTable
from tests.kernels.low_rank.adapters import make_adapter, slots_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sums_equal_reference(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, num_inputs = [70, 9, 30], 37
    adapters = [
        make_adapter([5, 0, 17], rows, num_inputs, generator, dtype),
        None,
        make_adapter([1, 40, 3], rows, num_inputs, generator, dtype),
    ]
    table = GpuAdapterTable(3, device, dtype)
    for slot, adapter in enumerate(adapters):
        table.place(slot, None if adapter is None else table.pack(adapter))
    slots = slots_of(*[0] * 18, 2, -1, 1, 2, -1)
    x = torch.randn(len(slots), num_inputs, generator=generator).to(dtype)
    memory = torch.randn(len(slots), sum(rows) + 7, generator=generator).to(dtype)
    expected, actual = memory.clone(), memory.to(device, copy=True)
    low_rank_reference(x, expected[:, : sum(rows)], slots.tolist(), adapters)
    table.add(x.to(device), actual[:, : sum(rows)], AdapterRows(slots, 44))
    tolerance = 1e-4 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)
    untouched = slots < 0
    assert torch.equal(actual.cpu()[untouched], memory[untouched])
