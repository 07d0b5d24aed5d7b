"""Keys and values made of latent vectors for a step, against attention over the latent vectors.

How much queries attend to blocks: by blocks as in one piece, in memory that does not grow with the sequence.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.layer_cache import LayerCache, dequantize_heads, quantize_heads
from kernels.paged_attention import (
    AttentionOptions,
    ExpandedBlocks,
    block_attention,
    expanded,
    expanded_attention,
    is_expansion_less,
    paged_attention,
    products_saved,
    reference,
)
from tests.kernels.poisoned_memory import poisoned_memory

BLOCK, PLAIN, ROTARY, VALUE = 4, 12, 8, 20
SCALE = 0.17
LENGTHS = [[(9, 9)], [(7, 30), (12, 12), (1, 40)], [(3, 50), (1, 1)], [(9, 9), (1, 0), (1, 0)]]


def batch(lengths: list[tuple[int, int]], num_heads: int, latent_dim: int) -> dict[str, Any]:
    """Sequences of (tokens of the step, cached ones included) over scattered blocks; NaN where nothing lies."""
    generator = torch.Generator().manual_seed(len(lengths))
    width = -(-max(context for _, context in lengths) // BLOCK) + 1
    tables = torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width).int()
    cache = torch.full((len(lengths) * width, BLOCK, 1, latent_dim + ROTARY), float("nan"))
    for table, (_, context) in zip(tables, lengths, strict=True):
        places = torch.arange(context)
        rows = torch.randn(context, latent_dim + ROTARY, generator=generator)
        cache[table[places // BLOCK].long(), places % BLOCK, 0] = rows
    counts = torch.tensor([query for query, _ in lengths])
    num_tokens = int(counts.sum())
    return {
        "query": torch.randn(num_tokens, num_heads, PLAIN + ROTARY, generator=generator),
        "cache": cache, "key_up": torch.randn(num_heads, PLAIN, latent_dim, generator=generator) * 0.3,
        "value_up": torch.randn(num_heads, latent_dim, VALUE, generator=generator) * 0.3,
        "where": (
            tables, torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
            torch.tensor([context for _, context in lengths]).int(), int(counts.max()),
            max(context for _, context in lengths),
        ),
    }  # fmt: skip


def in_latent_form(query: Any, cache: Any, key_up: Any, value_up: Any, where: Any) -> torch.Tensor:
    plain, turning = query.split_with_sizes((PLAIN, ROTARY), dim=2)
    latent = torch.cat((torch.einsum("nhp,hpl->nhl", plain, key_up), turning), dim=2)
    values = cache[..., : key_up.shape[2]]
    attended = paged_attention(latent, LayerCache(cache, values), *where, AttentionOptions(SCALE))
    return torch.einsum("nhl,hlv->nhv", attended, value_up)


def in_expanded_form(
    query: Any, cache: Any, key_up: Any, value_up: Any, where: Any,
    scales: torch.Tensor | None = None, num_spare: int = 0,
) -> torch.Tensor:  # fmt: skip
    kept = LayerCache(cache, cache[..., : key_up.shape[2]], scales)
    with poisoned_memory():
        tables, starts, lens, *most = where
        num_blocks = sum(-(-context // BLOCK) for context in lens.tolist()) + num_spare
        blocks = ExpandedBlocks.of(tables, lens, BLOCK, num_blocks)
        options = AttentionOptions(SCALE)
        return expanded_attention(query, kept, key_up, value_up, blocks, starts, lens, *most, options)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("num_spare", [0, 50])
def test_both_forms_are_equal(
    lengths: list[tuple[int, int]], num_spare: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs have room for further blocks, and sequences of padding."""
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("Triton does not support this platform")
        from kernels.paged_attention.triton_attention import PagedAttentionBatch, paged_attention_triton

        def attend(*args: Any, in_chunks: bool) -> torch.Tensor:
            tensors, (most, _, options) = args[:5], args[5:]
            batch = PagedAttentionBatch(*tensors, options)
            return paged_attention_triton(batch, most, Gpu(GpuGeneration.HOPPER, 132), in_chunks=in_chunks)

        monkeypatch.setattr(expanded, "paged_attention", attend)
    given = batch(lengths, num_heads=4, latent_dim=24)
    expected = in_latent_form(**given)
    actual = in_expanded_form(**given, num_spare=num_spare)
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_eight_bits_are_read_as_the_latent_form_reads_them() -> None:
    given = batch([(7, 30), (12, 12)], num_heads=4, latent_dim=24)
    heads, scales = quantize_heads(given["cache"].nan_to_num(), torch.int8)
    wide = heads.float() * scales.float()[..., None]
    kv_scales = scales.transpose(1, 2)[..., None].expand(-1, -1, -1, 2).contiguous()
    expected = in_latent_form(**(given | {"cache": wide}))
    actual = in_expanded_form(**(given | {"cache": heads}), scales=kv_scales)
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_keys_and_values_take_the_memory_of_the_steps_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []

    def attend(query: Any, cache: LayerCache, *args: Any, **settings: Any) -> torch.Tensor:
        sizes.append((cache.keys.shape[0] * cache.keys.shape[1], cache.keys.shape[2]))
        return paged_attention(query, cache, *args, **settings)

    monkeypatch.setattr(expanded, "paged_attention", attend)
    given = batch([(16, 64)], num_heads=8, latent_dim=24)
    torch.testing.assert_close(in_expanded_form(**given), in_latent_form(**given), atol=1e-4, rtol=1e-4)
    # A quarter of the heads at a time, where the context is four times as long.
    assert sizes == [(64, 2)] * 4
    sizes.clear()
    given = batch([(16, 16), (1, 3), (1, 45)], num_heads=8, latent_dim=24)
    torch.testing.assert_close(in_expanded_form(**given), in_latent_form(**given), atol=1e-4, rtol=1e-4)
    # Of each sequence its own blocks, not as many as the longest has: 16, 4 and 48 tokens. Its own 18 have 12 more at
    # the ends of blocks.
    assert sizes == [(68, 3), (68, 3), (68, 2)]
    sizes.clear()
    given = batch([(32, 32), *[(1, 1)] * 24], num_heads=8, latent_dim=24)
    torch.testing.assert_close(in_expanded_form(**given), in_latent_form(**given), atol=1e-4, rtol=1e-4)
    # Three quarters of the blocks of 24 sequences are empty: of eight that does not count.
    assert sizes == [(128, 4)] * 2


class Keys(set[object]):
    """In the place of a kernel: what it would be compiled for, launch by launch."""

    def __init__(self, kernel: Any) -> None:
        self._names = list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *args: Any, **constants: Any) -> None:
        # Counts are not specialised.
        kinds = tuple(
            kind(arg) for name, arg in zip(self._names, args, strict=False) if name not in ("num_seqs", "num_splits")
        )
        self.add((kinds, frozenset(constants.items())))


def kind(arg: Any) -> object:
    """Return what Triton tells apart: types, whether an address or a number is a multiple of 16, and the number 1."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.storage_offset() * arg.itemsize % 16 == 0
    return (arg == 1, arg % 16 == 0) if isinstance(arg, int) else type(arg)


@pytest.mark.parametrize("num_heads", [16, 128])
def test_one_compiled_kernel_serves_prompts_of_all_lengths(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of DeepSeek's sizes, whatever the number of heads at once; and one that adds up splits."""
    triton_attention = pytest.importorskip("kernels.paged_attention.triton_attention")
    names = [name for name in vars(triton_attention) if name.endswith("_kernel")]
    keys = {name: Keys(getattr(triton_attention, name)) for name in names}
    for name in names:
        monkeypatch.setattr(triton_attention, name, keys[name])
    at_once: set[int] = set()

    def attend(*args: Any, in_chunks: bool) -> torch.Tensor:
        at_once.add(args[0].shape[1])
        batch = triton_attention.PagedAttentionBatch(*args[:5], args[7])
        attended: torch.Tensor = triton_attention.paged_attention_triton(
            batch, args[5], Gpu(GpuGeneration.HOPPER, 132), in_chunks=in_chunks
        )
        return attended

    monkeypatch.setattr(expanded, "paged_attention", attend)
    empty = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    places = functools.partial(torch.empty, dtype=torch.int32, device="meta")
    cache = empty(8192, 16, 1, 576)
    for num_seqs, query_len, context_len in itertools.product(
        (1, 2, 3), (1, 7, 171, 512, 2047), (2048, 2065, 8000, 32_767)
    ):
        where = (places(num_seqs + 1), places(num_seqs), query_len, context_len)
        blocks = ExpandedBlocks.of(places(num_seqs, 2048), where[1], 16, num_seqs * -(-context_len // 16))
        expanded_attention(
            empty(num_seqs * query_len, num_heads, 192), LayerCache(cache, cache[..., :512], is_latent=True),
            empty(num_heads, 128, 512), empty(num_heads, 512, 128), blocks, *where, AttentionOptions(SCALE),
        )  # fmt: skip
    assert len(at_once) >= 4
    assert {name: len(found) for name, found in keys.items() if found} == {
        "chunk_attention_kernel": 1,
        "reduce_chunk_splits_kernel": 1,
    }


@pytest.mark.parametrize(
    ("query_len", "context_len", "num_decoded", "expected"),
    [
        # Of a new prompt they cost nothing, but launches.
        (255, 255, 0, False),
        (256, 256, 0, True),
        (8192, 8192, 0, True),
        # Tokens of decodes beside a prompt that pays for them, beside one that does not, and alone.
        (512, 512, 760, True),
        (512, 512, 780, False),
        (2048, 2048, 12_000, True),
        (2048, 2048, 12_500, False),
        (0, 0, 8192, False),
    ],
)
def test_prompts_of_some_hundred_tokens_are_expanded(
    query_len: int, context_len: int, num_decoded: int, expected: bool
) -> None:
    """DeepSeek's sizes."""
    num_pairs = query_len * (2 * context_len - query_len) // 2 + num_decoded
    sizes = (query_len + bool(num_decoded), num_pairs, context_len + num_decoded)
    assert is_expansion_less(128, 512, 128, *sizes) is expected


def test_products_are_counted_as_both_forms_multiply() -> None:
    """Two chunks and a decode: what the latent form takes, less what the other one does, head by head."""
    lengths, (plain, latent, value) = [(70, 300), (512, 512), (1, 40)], (128, 512, 128)
    num_tokens, num_cached = (sum(column) for column in zip(*lengths, strict=True))
    num_pairs = sum(context - query + place for query, context in lengths for place in range(1, query + 1))
    in_latents = num_pairs * 2 * latent + num_tokens * (plain * latent + latent * value)
    in_heads = num_pairs * (plain + value) + num_cached * (latent * plain + latent * value)
    assert products_saved(plain, latent, value, num_tokens, num_pairs, num_cached) == in_latents - in_heads


class Widest(TorchDispatchMode):
    """Records the sizes of tensors in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits_are_widened_once_to_the_type_of_queries(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[torch.Tensor] = []

    def attend(query: torch.Tensor, cache: LayerCache, *_: Any, **__: Any) -> torch.Tensor:
        kept.append(cache.values)
        return query.new_zeros(len(query), query.shape[1], VALUE)

    monkeypatch.setattr(expanded, "paged_attention", attend)
    given = batch([(64, 64)], num_heads=1, latent_dim=24)
    heads, scales = quantize_heads(given["cache"].nan_to_num(), dtype)
    kv_scales = scales.transpose(1, 2)[..., None].expand(-1, -1, -1, 2).contiguous()
    given |= {name: given[name].bfloat16() for name in ("query", "key_up", "value_up")}
    with Widest() as widest:
        in_expanded_form(**(given | {"cache": heads}), scales=kv_scales)
    # Scales alone.
    assert max(widest.sizes) == 64
    rows = (heads.float() * scales.float()[..., None]).bfloat16()[given["where"][0][0, :16].long()].flatten(0, 2)
    expected = rows[:, :24] @ given["value_up"][0]
    torch.testing.assert_close(kept[0].flatten(0, 2), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("num_tokens", "expected"), [(32, [8]), (29, [8]), (30, [8]), (17, [8]), (11, [4, 4])])
def test_no_group_of_heads_is_left_over_for_the_end_of_a_block(
    num_tokens: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are as large as one another: each has launches of its own."""
    counts: list[int] = []

    def attend(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        counts.append(query.shape[1])
        return query.new_zeros(len(query), query.shape[1], VALUE)

    monkeypatch.setattr(expanded, "paged_attention", attend)
    context = 20 if num_tokens == 11 else num_tokens
    in_expanded_form(**batch([(num_tokens, context)], num_heads=8, latent_dim=24))
    assert counts == expected


HEADS, KV_HEADS, SIZE, BLOCKS_BLOCK = 6, 2, 8, 4


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
    return weights.view(*weights.shape[:-1], -1, BLOCKS_BLOCK).sum(-1).amax(1)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("most_gathered", [1, 3 * 2 * BLOCKS_BLOCK * KV_HEADS * SIZE, 1 << 20])
def test_sums_by_block_are_those_of_all_probabilities(
    soft_cap: float | None,
    has_sinks: bool,
    is_quantized: bool,
    most_gathered: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "_MAX_GATHERED", most_gathered)
    torch.manual_seed(1)
    cache = torch.randn(40, BLOCKS_BLOCK, KV_HEADS, SIZE)
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
    cache, query = torch.randn(2000, BLOCKS_BLOCK, KV_HEADS, SIZE), torch.randn(1, 2, HEADS, SIZE)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        contexts = torch.tensor([[7999, 8000]])
        block_attention(query, LayerCache(cache, cache), torch.arange(2000)[None], contexts, AttentionOptions(0.3))
    # One number for each block, head and query is left of all keys.
    assert largest.num_numbers <= 2000 * HEADS * 2 < cache.numel() / 5
