"""Rotations beyond the plain one, and heads of keys and values that differ, on GPUs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.rope_kv_write import HeadNormWeights
from kernels.rope_kv_write.triton_kernel import rope_kv_write_triton
from tests.kernels.rope_variants import VARIANTS, Variant, check


def write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    slots: torch.Tensor,
    norm: HeadNormWeights | None,
    scales: torch.Tensor | None,
    values: torch.Tensor | None,
    first_rotated: int,
    is_interleaved: bool,
) -> torch.Tensor:
    arguments = (qkv, positions, cos_sin, key_cache, value_cache, slots, norm)
    return rope_kv_write_triton(*arguments, scales, values, first_rotated, is_interleaved)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_written_heads_equal_reference(variant: Variant, device: torch.device) -> None:
    check(write, variant, device)
