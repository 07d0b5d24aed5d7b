"""Rotations: the defining properties; the frequencies of each scaling are checked against `transformers` in models.

Layer normalisation against its formula, and which normalisation is chosen.

Which layers the fused kernels of a CPU can compute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu_worker.layers import rotations
from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.layers.norms import LayerNorm, NormWeights, RMSNorm, make_norm
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType, for_length, rope_angles
from gpu_worker.layers.rotations import Rotations, head_order, head_rows
from kernels.rope_kv_write import rope_kv_write

CPU = torch.device("cpu")


def rotate(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate query heads, each token's at its own position."""
    table = Rotations([RopeParameters(RopeType.DEFAULT, 1e4, 512)], 512, CPU).of(0, heads.shape[2])
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


def test_divisors_hold_for_every_length_where_there_are_no_long_ones() -> None:
    divided = RopeParameters(RopeType.DEFAULT, 1e4, 64, divisors=(2.0,) * 8)
    assert for_length(divided, 128) == divided


@pytest.mark.parametrize("rope_type", [RopeType.DEFAULT, RopeType.DYNAMIC, RopeType.LONGROPE])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_rows_that_are_computed_late_are_those_of_the_whole_table(
    rope_type: RopeType, rotary_dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    turning = rotary_dim or 16
    rope = RopeParameters(
        rope_type, 1e4, 64, factor=4.0, divisors=(1.0,) * (turning // 2), long_divisors=(3.0,) * (turning // 2)
    )
    whole = Rotations([rope], 200, CPU).of(0, 16, rotary_dim)
    monkeypatch.setattr(rotations, "CHUNK", 32)
    lazy = Rotations([rope], 200, CPU, is_lazy=True)
    table = lazy.of(0, 16, rotary_dim)
    for length in (3, 32, 33, 150, 200):
        lazy.cover(torch.tensor([0, length - 1]))
        assert torch.equal(table[:length], whole[:length])
    unrotated = lazy.of(None, 16)
    assert torch.equal(unrotated, torch.tensor([1.0] * 8 + [0.0] * 8).expand(200, 16))


def test_positions_that_no_sequence_reaches_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    monkeypatch.setattr(rotations, "fill_rows", lambda *a: computed.append(a[-1] - a[-2]))
    lazy = Rotations([RopeParameters(RopeType.DEFAULT, 1e4, 64)], 1 << 24, CPU, is_lazy=True)
    table = lazy.of(0, 16)
    lazy.cover(torch.arange(2048))
    assert (sum(computed), len(table)) == (rotations.CHUNK, 1 << 24)
    lazy.cover(torch.tensor([rotations.CHUNK]))
    assert sum(computed) == 2 * rotations.CHUNK


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


SIZE = 37
EPS = 1e-3


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.7


def by_formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x, mean = x.double(), x.double().mean(1, keepdim=True)
    variance = ((x - mean) ** 2).mean(1, keepdim=True)
    return (x - mean) / (variance + EPS).sqrt() * weight.double() + (0 if bias is None else bias.double())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_normalised_as_the_formula_says(dtype: torch.dtype, weight_dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = numbers(5, SIZE, seed=1).to(dtype), numbers(SIZE, seed=2).to(weight_dtype)
    bias = numbers(SIZE, seed=3).to(dtype) if has_bias else None
    result = LayerNorm(weight, bias, EPS)(x)
    assert result.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(result.double(), by_formula(x, weight, bias), rtol=tolerance, atol=tolerance)


def test_a_sum_is_normalised_and_kept() -> None:
    x, stream, weight = numbers(3, SIZE, seed=4), numbers(3, SIZE, seed=5), numbers(SIZE, seed=6)
    whole = x + stream
    result = LayerNorm(weight, None, EPS).add(x, stream)
    assert torch.equal(stream, whole)
    torch.testing.assert_close(result.double(), by_formula(whole, weight, None), rtol=1e-5, atol=1e-5)


def test_the_weights_say_which_normalisation_it_is() -> None:
    weight = torch.ones(SIZE)
    assert isinstance(make_norm(NormWeights(weight, EPS)), RMSNorm)
    assert isinstance(make_norm(NormWeights(weight, EPS, is_centered=True)), LayerNorm)
    with pytest.raises(AssertionError, match="a bias"):
        make_norm(NormWeights(weight, EPS, bias=weight))


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_rows_are_scaled_to_the_weight_and_eps_bounds_tiny_ones() -> None:
    cases = (torch.randn(5, 33) * 10, torch.rand(33), 1e-5, 1e-5), (torch.full((1, 8), 1e-4), torch.ones(8), 1e-2, 1e-7)
    for x, weight, eps, tolerance in cases:
        torch.testing.assert_close(RMSNorm(weight, eps)(x).double(), exact(x, weight, eps), atol=tolerance, rtol=0)


def test_large_half_precision_rows_do_not_overflow() -> None:
    result = RMSNorm(torch.ones(64, dtype=torch.float16), 1e-6)(torch.full((2, 64), 6e4, dtype=torch.float16))
    assert torch.equal(result, torch.ones_like(result))


def test_weights_may_be_more_precise_than_rows() -> None:
    x, weight = torch.randn(5, 33).bfloat16(), 1 + torch.randn(33) * 1e-3
    result = RMSNorm(weight, 1e-5)(x)
    assert torch.equal(result, exact(x, weight, 1e-5).bfloat16())


def test_add_updates_the_residual_in_place() -> None:
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)
    total = x + residual
    result = RMSNorm(weight, 1e-5).add(x, residual)
    assert torch.equal(residual, total)
    torch.testing.assert_close(result.double(), exact(total, weight, 1e-5), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "is_fusable"),
    [
        ({}, True),
        ({"logit_scale": 2.0, "logit_soft_cap": 30.0, "has_final_norm": False}, True),
        ({"residual_scale": 2.0}, False),
        ({"embedding_scale": 2.0}, False),
        ({"is_parallel": True}, False),
        ({"positions": object()}, False),
        ({"embeddings": object()}, False),
        ({"layer_inputs": object()}, False),
    ],
)
def test_layers_are_fused_whatever_the_scores_are_multiplied_by(changes: dict[str, Any], is_fusable: bool) -> None:
    assert replace(BlockTraits(), **changes).is_fusable is is_fusable


@pytest.mark.parametrize("change", [{"is_centered": True}, {"has_bias": True}])
def test_layers_of_another_normalisation_are_not_fused(change: dict[str, bool]) -> None:
    block = BlockTraits()
    assert not replace(block, norm=replace(block.norm, **change)).is_fusable
