"""The order of a head's dimensions: rotating halves in it scores as the checkpoint's own pairs do."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.rotations import head_order, head_rows

DIM = 12
ANGLES = torch.tensor([0.3, 1.1, 2.0, 0.7, 1.9, 0.2], dtype=torch.float64)


def rotated_as_stored(head: torch.Tensor, shape: AttentionShape, position: int) -> torch.Tensor:
    """Turn each pair of the checkpoint's, as complex numbers."""
    turning = shape.rotary_dim or DIM
    pairs = [(2 * i, 2 * i + 1) if shape.interleaved else (i, i + turning // 2) for i in range(turning // 2)]
    result = head.clone()
    for pair, (first, second) in enumerate(pairs):
        turned = torch.complex(head[first], head[second]) * torch.exp(1j * position * ANGLES[pair])
        result[first], result[second] = turned.real, turned.imag
    return result


def rotated_by_halves(head: torch.Tensor, num_pairs: int, position: int) -> torch.Tensor:
    """Turn dimension `i` with `i + DIM / 2`, of the first pairs."""
    angles = torch.zeros(DIM // 2, dtype=torch.float64)
    angles[:num_pairs] = position * ANGLES[:num_pairs]
    first, second = head.chunk(2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 4, 6, 10])
def test_scores_do_not_change(interleaved: bool, rotary_dim: int | None) -> None:
    shape = AttentionShape(1, 1, DIM, rotary_dim=rotary_dim, interleaved=interleaved)
    order = head_order(DIM, rotary_dim or DIM, is_interleaved=interleaved) or list(range(DIM))
    assert sorted(order) == list(range(DIM))
    query, key = torch.randn(2, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = rotated_as_stored(query, shape, 5) @ rotated_as_stored(key, shape, 2)
    num_pairs = (rotary_dim or DIM) // 2
    score = rotated_by_halves(query[order], num_pairs, 5) @ rotated_by_halves(key[order], num_pairs, 2)
    torch.testing.assert_close(score, expected)


@pytest.mark.parametrize("shape", [AttentionShape(1, 1, DIM), AttentionShape(1, 1, DIM, rotary=None, interleaved=True)])
def test_what_turns_by_halves_or_not_at_all_stays_in_order(shape: AttentionShape) -> None:
    assert shape.qkv_order() is None


def test_rows_of_several_heads_follow_their_order() -> None:
    assert head_rows([1, 0, 2], 2, first=10).tolist() == [11, 10, 12, 14, 13, 15]
