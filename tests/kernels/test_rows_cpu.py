"""The compiled kernels that work row by row, each against its reference."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import Activation
from kernels.activation.dispatch import silu_mul_cpu
from kernels.activation.reference import gated_reference
from kernels.cpu_library import CpuLibrary
from kernels.rms_norm.dispatch import rms_norm_cpu, rms_norm_reference
from kernels.rope_kv_write import HeadNormWeights
from kernels.rope_kv_write.dispatch import can_run, rope_kv_write_cpu
from kernels.rope_kv_write.reference import rope_kv_write_reference
from tests.kernels.layer_caches import EIGHT_BITS, assert_caches_close, poisoned_cache
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (5, 77), (13, 128), (3, 1000), (40, 1024)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_normalised_rows_equal_reference(library: CpuLibrary, num_rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    x, residual = torch.randn(2, num_rows, size, generator=generator).to(dtype)
    wide = torch.full((num_rows, size + 9), float("nan"), dtype=dtype)
    wide[:, :size] = x
    weight = torch.randn(size, generator=generator).to(dtype)
    expected_residual = residual.clone()
    expected = rms_norm_reference(x, weight, 1e-5, expected_residual)
    with poisoned_memory():
        plain = rms_norm_cpu(library, wide[:, :size], weight, 1e-5)
        added = rms_norm_cpu(library, x, weight, 1e-5, residual)
    assert_close(plain, rms_norm_reference(x, weight, 1e-5))
    assert_close(added, expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_gated_rows_equal_reference(library: CpuLibrary, num_rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    gate_up = (torch.randn(num_rows, 2 * size, generator=generator) * 2).to(dtype)
    with poisoned_memory():
        result = silu_mul_cpu(library, gate_up)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(result, gated_reference(gate_up, Activation.SILU), rtol=tolerance, atol=1e-5)


def test_extreme_gates_do_not_overflow(library: CpuLibrary) -> None:
    gate_up = torch.cat((torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e30]]), torch.ones(1, 5)), dim=1)
    result = silu_mul_cpu(library, gate_up)
    torch.testing.assert_close(result, torch.tensor([[-0.0, 0.0, 0.0, 100.0, 1e30]]), atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, *EIGHT_BITS], ids=str)
# Keys of blocks of 16 are written transposed.
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize(("head_dim", "rotated_dim"), [(64, 64), (40, 20), (6, 6)])
def test_rotated_tokens_equal_reference(
    library: CpuLibrary,
    head_dim: int,
    rotated_dim: int,
    block_size: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    normalises: bool,
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    fused = torch.randn(5, 9 * head_dim + 7, generator=generator).to(dtype)
    qkv = fused.as_strided((5, 9, head_dim), (9 * head_dim + 7, head_dim, 1))
    table = torch.rand(50, rotated_dim, generator=generator) * 2 - 1
    positions, slots = torch.tensor([0, 49, 7, 8, 3]), torch.tensor([3, 0, -1, 11, 5])
    norm = None
    if normalises:
        norm = HeadNormWeights(*(torch.rand(2, head_dim, generator=generator) + 0.5).to(dtype), eps=1e-5)
    theirs, mine = (poisoned_cache(4, block_size, 2, head_dim, cache_dtype, qkv.device) for _ in range(2))
    expected = rope_kv_write_reference(
        qkv.clone(), positions, table, theirs.keys, theirs.values, slots, norm, theirs.scales
    )
    assert can_run(qkv, positions, table, mine.keys, mine.values, norm)
    query = rope_kv_write_cpu(library, qkv, positions, table, mine.keys, mine.values, slots, norm, mine.scales)
    assert query.data_ptr() == qkv.data_ptr()
    assert_close(query, expected)
    assert_caches_close(mine, theirs)
