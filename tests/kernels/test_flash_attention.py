"""FlashAttention-3 is called as its package documents it, and only for what it takes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.paged_attention import dispatch, paged_attention
from kernels.paged_attention.flash_attention import MODULE, can_run, find_flash_attention, paged_attention_flash
from kernels.paged_attention.reference import paged_attention_reference
from tests.kernels.paged_batch import PagedBatch, Shape, make_batch, make_sequence
from tests.kernels.tolerances import assert_close

SHAPE = Shape(4, 2, 64, 16)
GPU_HOPPER, GPU_AMPERE, GPU_BLACKWELL = (9, 0), (8, 0), (10, 0)


def batch_of(lengths: list[int], query_lens: list[int], shape: Shape = SHAPE) -> PagedBatch:
    return make_batch([make_sequence(n, shape, seed=n) for n in lengths], query_lens, shape)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """What the package's documentation says of these arguments, query by query."""
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    group = q.shape[1] // k_cache.shape[2]
    result = torch.empty_like(q)
    for sequence, length in enumerate(cache_seqlens.tolist()):
        first, end = cu_seqlens_q[sequence : sequence + 2].tolist()
        slots = [(page_table[sequence, i // k_cache.shape[1]], i % k_cache.shape[1]) for i in range(length)]
        keys, values = (torch.stack([cache[slot] for slot in slots]) for cache in (k_cache, v_cache))
        for row in range(first, end):
            own = length - end + row
            left, right = window_size
            low = 0 if left < 0 else max(0, own - left)
            assert right in (-1, 0)
            seen_keys, seen_values = (part[low : own + 1].repeat_interleave(group, 1) for part in (keys, values))
            scores = torch.einsum("hd,thd->ht", q[row], seen_keys) * softmax_scale
            scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
            result[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), seen_values)
    return result


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package of FlashAttention-3 on a Hopper GPU."""
    module = ModuleType(MODULE)
    module.__spec__ = ModuleSpec(MODULE, None)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: GPU_HOPPER)
    find_flash_attention.cache_clear()
    yield module
    find_flash_attention.cache_clear()


@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(None, None), (1, None), (20, None), (None, 2.0), (8, 2.0)])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 20, 5]], ids=["decodes", "mixed"])
def test_arguments_mean_what_ours_mean(
    query_lens: list[int], sliding_window: int | None, soft_cap: float | None
) -> None:
    batch = batch_of([70, 33, 5], query_lens)
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables)
    actual = paged_attention_flash(
        flash_attn_with_kvcache,
        *tensors,
        batch.query_starts,
        batch.context_lens,
        batch.max_query_len,
        batch.scale,
        sliding_window,
        soft_cap,
    )
    assert_close(actual, paged_attention_reference(*batch.arguments(), sliding_window, soft_cap))


def test_package_is_found_on_the_gpus_that_it_is_for(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_flash_attention(torch.device("cuda", 0)) is flash_attn_with_kvcache
    assert find_flash_attention(torch.device("cpu")) is None
    for number, capability in enumerate((GPU_AMPERE, GPU_BLACKWELL), start=1):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert find_flash_attention(torch.device("cuda", number)) is None


def test_package_that_lacks_the_function_is_told_and_not_used(package: ModuleType) -> None:
    del package.flash_attn_with_kvcache
    with pytest.warns(RuntimeWarning, match="flash_attn_interface is installed but cannot be used"):
        assert find_flash_attention(torch.device("cuda", 0)) is None


def test_nothing_is_found_where_the_package_is_not_installed(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_flash_attention(torch.device("cuda", 0)) is None


def test_trees_eight_bits_and_float32_are_left_to_our_kernels() -> None:
    query, cache = torch.empty(1, 4, 64, dtype=torch.bfloat16), torch.empty(2, 16, 2, 64, dtype=torch.bfloat16)
    assert can_run(query, cache, cache, None, None)
    assert not can_run(query, cache, cache[..., :8], None, None)
    assert not can_run(query, cache[:, :8], cache[:, :8], None, None)
    assert not can_run(query, cache, cache, None, torch.zeros(1, dtype=torch.int64))
    assert not can_run(query, cache.to(torch.int8), cache.to(torch.int8), torch.empty(2, 2, 16, 2), None)
    assert not can_run(query.float(), cache.float(), cache.float(), None, None)
    for head_dim in (264, 20):
        cache = torch.empty(2, 16, 2, head_dim).bfloat16()
        assert not can_run(torch.empty(1, 4, head_dim).bfloat16(), cache, cache, None, None)


def test_dispatch_takes_it_for_what_it_can_and_ours_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []

    def attend(query: torch.Tensor, *caches: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(query.dtype)
        return query

    monkeypatch.setattr(dispatch, "find_flash_attention", lambda device: attend)
    half = batch_of([20, 9], [1, 3], Shape(4, 2, 64, 16, torch.float16))
    assert paged_attention(*half.arguments()) is half.query
    full = batch_of([20, 9], [1, 3])
    assert_close(paged_attention(*full.arguments()), paged_attention_reference(*full.arguments()))
    assert calls == [torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(None, None), (100, None), (None, 30.0)])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 333, 40]], ids=["decodes", "mixed"])
def test_installed_package_equals_the_reference(
    query_lens: list[int], sliding_window: int | None, soft_cap: float | None, device: torch.device
) -> None:
    flash = find_flash_attention(device)
    if flash is None:
        pytest.skip("FlashAttention-3 is not installed here")
    batch = batch_of([1500, 700, 65], query_lens, Shape(32, 8, 128, 16, torch.bfloat16))
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.query_starts)
    moved = [tensor.to(device) for tensor in (*tensors, batch.context_lens)]
    actual = paged_attention_flash(flash, *moved, batch.max_query_len, batch.scale, sliding_window, soft_cap)
    assert_close(actual, paged_attention_reference(*batch.arguments(), sliding_window, soft_cap))
