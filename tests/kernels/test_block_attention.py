"""How much queries attend to blocks: by blocks as in one piece, in memory that does not grow with the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.layer_cache import LayerCache, dequantize_heads, quantize_heads
from kernels.paged_attention import AttentionOptions, block_attention, reference

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 8, 4


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most numbers that any operation returned."""

    num_numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.num_numbers = max(self.num_numbers, result.numel())
        return result


def in_one_piece(
    query: torch.Tensor, keys: torch.Tensor, contexts: torch.Tensor, soft_cap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend to `keys`, `[num_seqs, num_tokens, KV_HEADS, SIZE]`."""
    scores = torch.einsum("sqhd,sthd->shqt", query, keys.repeat_interleave(HEADS // KV_HEADS, 2)) * 0.3
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    hidden = torch.arange(keys.shape[1]) >= contexts[..., None]
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]].contiguous()
    return weights.view(*weights.shape[:-1], -1, BLOCK).sum(-1).amax(1)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("most_gathered", [1, 3 * 2 * BLOCK * KV_HEADS * SIZE, 1 << 20])
def test_sums_by_block_are_those_of_all_probabilities(
    soft_cap: float | None,
    has_sinks: bool,
    is_quantized: bool,
    most_gathered: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "_MAX_GATHERED", most_gathered)
    torch.manual_seed(1)
    cache = torch.randn(40, BLOCK, KV_HEADS, SIZE)
    tables = torch.stack([torch.randperm(40)[:11] for _ in range(2)])
    query, contexts = torch.randn(2, 3, HEADS, SIZE), torch.tensor([[40, 41, 42], [5, 6, 7]])
    sinks = torch.randn(HEADS) if has_sinks else None
    scales, exact = None, cache
    if is_quantized:
        cache, scale = quantize_heads(cache, torch.int8)
        exact = dequantize_heads(cache, scale)
        scales = torch.stack((scale, scale), -1).transpose(1, 2)
    found = block_attention(
        query, LayerCache(cache, cache, scales), tables, contexts, AttentionOptions(0.3, None, soft_cap, sinks)
    )
    expected = in_one_piece(query, exact[tables].flatten(1, 2), contexts, soft_cap, sinks)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_a_long_sequence_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MAX_GATHERED", 1 << 12)
    cache, query = torch.randn(2000, BLOCK, KV_HEADS, SIZE), torch.randn(1, 2, HEADS, SIZE)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        contexts = torch.tensor([[7999, 8000]])
        block_attention(query, LayerCache(cache, cache), torch.arange(2000)[None], contexts, AttentionOptions(0.3))
    # One number for each block, head and query is left of all keys.
    assert largest.num_numbers <= 2000 * HEADS * 2 < cache.numel() / 5
