from __future__ import annotations

import pytest
import torch

from kernels.cpu_library import cpu_library
from kernels.kv_write.cpu import can_run, write_kv_cpu
from kernels.kv_write.dispatch import write_kv
from kernels.kv_write.reference import write_kv_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def empty_caches(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    caches = torch.full((2, 6, 5, 3, 7), float("nan"), dtype=dtype)
    return caches[0], caches[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_strided_rows_equal_reference(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    library = cpu_library()
    assert library is not None, "the tests need g++"
    fused = torch.randn(4, 60, generator=torch.Generator().manual_seed(0)).to(dtype)
    fused[0, 3] = float("inf")
    key, value = fused[:, 2:23].view(4, 3, 7), fused[:, 30:51].view(4, 3, 7)
    slots = torch.tensor([29, 0, 7, 12])
    assert can_run(key, value, empty_caches(cache_dtype)[0])
    expected, actual = empty_caches(cache_dtype), empty_caches(cache_dtype)
    write_kv_reference(key, value, *expected, slots)
    write_kv_cpu(library, key, value, *actual, slots)
    assert not expected[0].view(30, 3, 7)[slots].isnan().any()
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_transposed_heads_are_written_by_the_reference() -> None:
    key = torch.randn(3, 4, 7).transpose(0, 1)
    caches = empty_caches(torch.float32)
    assert not can_run(key, key, caches[0])
    write_kv(key, key, *caches, torch.tensor([1, 2, 3, 28]))
    assert torch.equal(caches[0].view(30, 3, 7)[[1, 2, 3, 28]], key)
