from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.layer_cache import LayerCache
from kernels.rope_kv_write import HeadNormWeights, rope_kv_write
from kernels.rope_kv_write.reference import rope_kv_write_reference
from kernels.rope_kv_write.triton_kernel import rope_kv_write_triton
from tests.kernels.layer_caches import EIGHT_BITS, assert_caches_close, assert_stands_for, poisoned_cache
from tests.kernels.tolerances import assert_close

MAX_POSITIONS = 50


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated_dim: int
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None


SHAPES = [
    Shape(4, 2, 64, 64), Shape(14, 2, 64, 64, torch.float16), Shape(5, 1, 80, 80), Shape(3, 3, 96, 24),
    Shape(17, 5, 128, 128, torch.float16, torch.float32),
    Shape(1, 1, 256, 64, torch.float16),
    Shape(4, 2, 64, 64, torch.float32, torch.int8),
    Shape(7, 3, 80, 80, torch.float16, torch.float8_e4m3fn),
    Shape(3, 3, 96, 24, torch.float16, torch.int8),
    Shape(5, 1, 128, 64, torch.float32, torch.float8_e4m3fn),
]  # fmt: skip


@dataclass
class Step:
    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    head_norm: HeadNormWeights | None
    kv_scales: torch.Tensor | None = None

    def arguments(self) -> tuple:
        """All but the scales of a cache in eight bits."""
        return tuple(vars(self).values())[:-1]

    @property
    def cache(self) -> LayerCache:
        return LayerCache(self.key_cache, self.value_cache, self.kv_scales)

    def run(self) -> torch.Tensor:
        return rope_kv_write_triton(*self.arguments(), self.kv_scales)

    def copy(self) -> Step:
        return replace(
            self,
            qkv=self.qkv.clone(),
            key_cache=self.key_cache.clone(),
            value_cache=self.value_cache.clone(),
            kv_scales=None if self.kv_scales is None else self.kv_scales.clone(),
        )


def make_step(shape: Shape, num_tokens: int, has_norm: bool, device: torch.device) -> Step:
    """A step whose second token is padding, over a cache of NaN with 8 slots to spare."""
    generator = torch.Generator().manual_seed(num_tokens)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    num_blocks = -(-(num_tokens + 8) // 4)
    # With a block ahead of either cache, where a padding token's slot would be.
    cache_dtype = shape.cache_dtype or shape.dtype
    cache = poisoned_cache(1 + num_blocks, 4, shape.num_kv_heads, shape.head_dim, cache_dtype, device)
    slots = torch.randperm(num_blocks * 4, generator=generator)[:num_tokens]
    slots[1:2] = -1
    angles = rand(MAX_POSITIONS, shape.rotated_dim // 2)
    weights = rand(2, shape.head_dim).to(device, shape.dtype)
    return Step(
        rand(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim).to(device, shape.dtype),
        torch.randint(MAX_POSITIONS, (num_tokens,), generator=generator).to(device),
        torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        cache.keys[1:],
        cache.values[1:],
        slots.to(device),
        HeadNormWeights(weights[0], weights[1], 1e-6) if has_norm else None,
        None if cache.scales is None else cache.scales[1:],
    )


def check(shape: Shape, num_tokens: int, has_norm: bool, device: torch.device) -> None:
    actual = make_step(shape, num_tokens, has_norm, device)
    expected = actual.copy()
    query = actual.run()
    assert query.data_ptr() == actual.qkv.data_ptr()
    assert_close(query, rope_kv_write_reference(*expected.arguments(), expected.kv_scales))
    assert torch.equal(actual.qkv[:, shape.num_heads :], expected.qkv[:, shape.num_heads :])
    assert_caches_close(actual.cache, expected.cache)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_step_equals_reference(shape: Shape, has_norm: bool, device: torch.device) -> None:
    check(shape, 5, has_norm, device)


def test_padding_is_not_written(device: torch.device) -> None:
    step = make_step(SHAPES[0], 5, False, device)
    caches = torch.full((2, 1 + len(step.key_cache), *step.key_cache.shape[1:]), float("nan"), device=device)
    step.key_cache, step.value_cache = caches[0, 1:], caches[1, 1:]
    step.run()
    assert caches[:, 0].isnan().all()
    assert (~caches.isnan()).any(dim=(3, 4)).sum() == 2 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 77, 8192])
@pytest.mark.parametrize("shape", [replace(shape, dtype=torch.bfloat16) for shape in SHAPES], ids=str)
def test_bfloat16_step_equals_reference(shape: Shape, num_tokens: int, has_norm: bool, device: torch.device) -> None:
    check(shape, num_tokens, has_norm, device)


def test_reference_equals_rotation_of_complex_numbers() -> None:
    step = make_step(Shape(3, 2, 16, 16, torch.float64), 4, False, torch.device("cpu"))
    first, second = step.qkv.chunk(2, dim=2)
    cos, sin = step.cos_sin[step.positions].double().unsqueeze(1).chunk(2, dim=2)
    rotated = torch.complex(first, second) * torch.complex(cos, sin)
    expected = torch.cat((rotated.real, rotated.imag), dim=2)
    query = rope_kv_write_reference(*step.arguments())
    torch.testing.assert_close(query, expected[:, :3], atol=1e-6, rtol=1e-6)
    keys = step.key_cache.flatten(0, 1)[step.slot_mapping[2:]]
    torch.testing.assert_close(keys, expected[2:, 3:5], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("cache_dtype", EIGHT_BITS, ids=str)
def test_reference_writes_heads_as_well_as_eight_bits_can(cache_dtype: torch.dtype) -> None:
    shape = Shape(3, 2, 64, 64, torch.float32)
    plain, step = (make_step(shape, 6, True, torch.device("cpu")) for _ in range(2))
    for some in (plain, step):
        some.qkv[3] *= 1e-3
        some.qkv[4] *= 3e4
        some.qkv[5] = 0
    cache = poisoned_cache(len(step.key_cache), 4, 2, 64, cache_dtype, torch.device("cpu"))
    step.key_cache, step.value_cache, step.kv_scales = cache.keys, cache.values, cache.scales
    rope_kv_write_reference(*plain.arguments())
    rope_kv_write_reference(*step.arguments(), step.kv_scales)
    slots = step.slot_mapping[[0, 2, 3, 4, 5]]
    for kind, expected in enumerate((plain.key_cache, plain.value_cache)):
        assert_stands_for(cache, kind, slots, expected.flatten(0, 1)[slots])


def test_strided_tokens_equal_contiguous_tokens(device: torch.device) -> None:
    expected = make_step(SHAPES[0], 3, True, device)
    actual = expected.copy()
    wide = torch.full((3, 12, 64), float("nan"), device=device)
    wide[:, 2:10] = actual.qkv
    actual.qkv = wide[:, 2:10]
    query = actual.run()
    assert torch.equal(query, expected.run())
    assert wide[:, :2].isnan().all()
    assert wide[:, 10:].isnan().all()


def test_cpu_tensors_equal_reference() -> None:
    actual = make_step(SHAPES[0], 3, True, torch.device("cpu"))
    expected = actual.copy()
    assert_close(rope_kv_write(*actual.arguments()), rope_kv_write_reference(*expected.arguments()))
