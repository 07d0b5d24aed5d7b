"""Rotations beyond the plain one, and heads of keys and values that differ, on CPUs."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu_library import cpu_library
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_kv_write.dispatch import MAX_HEAD_DIM, can_run
from kernels.rope_kv_write.reference import HeadNormWeights
from tests.kernels.rope_variants import VARIANTS, Variant, check


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_written_heads_equal_reference(variant: Variant) -> None:
    assert cpu_library() is not None, "the tests need g++"
    check(rope_kv_write, variant, torch.device("cpu"))


def test_kernel_takes_the_variants() -> None:
    qkv, cache = torch.empty(5, 9, 24), torch.empty(4, 3, 2, 24)
    positions = torch.zeros(5, dtype=torch.int64)
    assert can_run(qkv, positions, None, cache, None, None)
    assert can_run(qkv, positions, None, None, None, None)
    assert can_run(qkv, positions, None, cache, cache[..., :16], None, torch.empty(5, 2, 16))
    assert can_run(qkv, positions, torch.empty(9, 24), cache.to(torch.int8), cache.to(torch.float8_e4m3fn), None)


def test_what_the_kernel_cannot_read_is_left_to_the_reference() -> None:
    qkv, cache = torch.empty(5, 9, 24), torch.empty(4, 3, 2, 24)
    positions, values = torch.zeros(5, dtype=torch.int64), torch.empty(5, 2, 24)
    norm = HeadNormWeights(torch.empty(24), torch.empty(24), 1e-6)
    assert can_run(qkv, positions, None, cache, cache, norm, values)
    assert not can_run(qkv.to("meta"), positions, None, cache, cache, None)
    assert not can_run(qkv.double(), positions, None, cache, cache, None)
    assert not can_run(qkv, positions.int(), None, cache, cache, None)
    assert not can_run(qkv, positions, torch.empty(9, 24).bfloat16(), cache, cache, None)
    assert not can_run(qkv, positions, None, cache.double(), cache, None)
    assert not can_run(qkv, positions, None, cache, cache.to(torch.uint8), None)
    assert not can_run(qkv, positions, None, cache, cache.transpose(2, 3), None)
    wide = MAX_HEAD_DIM + 1
    assert not can_run(torch.empty(5, 9, wide), positions, None, cache, cache, None)
    assert not can_run(qkv, positions, None, torch.empty(4, 3, 2, wide), cache, None)
    assert not can_run(qkv.transpose(1, 2), positions, None, cache, cache, None)
    assert not can_run(torch.empty(5, 9, 48)[..., ::2], positions, None, cache, cache, None)
    for other in (torch.empty(5, 24, 2).transpose(1, 2), values.bfloat16()):
        assert not can_run(qkv, positions, None, cache, cache, None, other)
    for query, key in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2):
        mixed = HeadNormWeights(torch.empty(24, dtype=query), torch.empty(24, dtype=key), 1e-6)
        assert not can_run(qkv, positions, None, cache, cache, mixed)


def test_neighbours_are_turned_as_complex_numbers() -> None:
    query = torch.randn(3, 2, 12, dtype=torch.float64)
    angles = torch.randn(7, 4, dtype=torch.float64)
    positions = torch.tensor([0, 6, 3])
    turned = torch.view_as_complex(query[..., 4:].reshape(3, 2, 4, 2)) * torch.polar(
        torch.ones(3, 1, 4, dtype=torch.float64), angles[positions][:, None]
    )
    expected = torch.cat((query[..., :4], torch.view_as_real(turned).flatten(2)), -1)
    table = torch.cat((angles.cos(), angles.sin()), 1).float()
    slots = torch.full((3,), -1)
    actual = rope_kv_write(query.clone(), positions, table, None, None, slots, first_rotated=4, is_interleaved=True)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
