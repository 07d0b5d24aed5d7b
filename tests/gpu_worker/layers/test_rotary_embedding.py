"""Rotations: the defining properties; the frequencies of each scaling are checked against `transformers` in models."""

from __future__ import annotations

import torch

from gpu_worker.layers.rope_scaling import RopeParameters, RopeType, rope_angles
from gpu_worker.layers.rotary_embedding import rotary_table
from kernels.rope_kv_write import rope_kv_write

CPU = torch.device("cpu")


def rotate(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate query heads, each token's at its own position."""
    table = rotary_table(RopeParameters(RopeType.DEFAULT, 1e4, 512), heads.shape[2], 512, CPU)
    cache = torch.empty(len(heads), 1, 1, heads.shape[2])
    qkv = torch.cat((heads, heads[:, :1], heads[:, :1]), dim=1)
    return rope_kv_write(qkv, positions, table, cache, cache.clone(), torch.arange(len(heads)))


def test_rotation_equals_complex_multiplication() -> None:
    heads, positions = torch.randn(6, 3, 16), torch.tensor([0, 5, 1, 300, 511, 7])
    rotated = rotate(heads, positions)
    angles = positions[:, None].double() * 1e4 ** (-torch.arange(8).double() / 8)
    turned = torch.complex(heads[..., :8], heads[..., 8:]).to(torch.complex128) * torch.exp(1j * angles)[:, None]
    torch.testing.assert_close(rotated.double(), torch.cat((turned.real, turned.imag), -1), atol=1e-4, rtol=0)


def test_scores_depend_on_distance_alone() -> None:
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    scores = [(rotate(query, torch.tensor([at + 9])) * rotate(key, torch.tensor([at]))).sum() for at in (0, 50, 400)]
    torch.testing.assert_close(scores[1], scores[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(scores[2], scores[0], atol=1e-4, rtol=0)


def test_dynamic_scaling_starts_beyond_the_original_length() -> None:
    positions = torch.arange(128)
    plain = rope_angles(RopeParameters(RopeType.DEFAULT, 1e4, 64), 16, positions)
    dynamic = rope_angles(RopeParameters(RopeType.DYNAMIC, 1e4, 64, factor=4.0), 16, positions)
    torch.testing.assert_close(dynamic[:64], plain[:64], atol=1e-5, rtol=1e-6)
    assert (dynamic[64:, 1:] < plain[64:, 1:]).all()
