from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

import triton
import triton.language as tl

from kernels.gpu_config import Gpu, GpuGeneration, gpu_of
from kernels.layer_cache import LayerCache
from kernels.paged_attention import paged_attention, triton_attention
from kernels.paged_attention.reference import paged_attention_reference
from kernels.paged_attention.triton_attention import can_run, paged_attention_triton
from kernels.paged_attention.triton_config import (
    MAX_CHUNK_SPLITS,
    MAX_SPLITS,
    ChunkConfig,
    SplitConfig,
    choose_num_chunk_splits,
    choose_num_shares,
    most_splits,
)
from kernels.paged_attention.triton_split import divide_sequences
from tests.kernels.paged_batch import PagedBatch, Shape, make_batch, make_sequence
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.tolerances import assert_close

# With one multiprocessor a sequence is not divided; with 64, as often as its shortest splits allow.
ONE_SPLIT, SPLITS = Gpu(GpuGeneration.HOPPER, 1), Gpu(GpuGeneration.HOPPER, 64)
SPLIT = SplitConfig(block_n=16, num_warps=4, num_stages=2, programs_per_multiprocessor=1, min_split_tokens=32)
CHUNK = ChunkConfig(
    block_m=16, block_n=16, num_warps=4, num_stages=2, programs_per_multiprocessor=2, min_split_tokens=32
)
SHAPES = [
    Shape(4, 2, 64, 16), Shape(6, 2, 80, 16), Shape(3, 3, 128, 32), Shape(7, 1, 96, 64, torch.float16),
    Shape(20, 1, 16, 8), Shape(2, 1, 256, 16, torch.float16),
    Shape(4, 2, 24, 4, torch.float32, torch.float16),
    Shape(4, 2, 64, 16, torch.float32, torch.int8),
    Shape(4, 2, 64, 16, torch.float16, torch.float8_e4m3fn),
    Shape(6, 2, 80, 8, torch.float16, torch.int8),
    Shape(3, 3, 24, 4, torch.float32, torch.float8_e4m3fn),
]  # fmt: skip
GPU_SHAPES = [
    replace(shape, dtype=torch.bfloat16, cache_dtype=None)
    for shape in [
        *SHAPES[:7],
        Shape(32, 8, 128, 16),
        Shape(32, 8, 128, 64),
        Shape(14, 2, 64, 32),
        Shape(16, 16, 256, 16),
    ]
]
GPU_SHAPES += [
    replace(shape, cache_dtype=dtype) for shape in GPU_SHAPES[1:10:2] for dtype in (torch.int8, torch.float8_e4m3fn)
]
SMALL, INT8, FP8 = SHAPES[0], SHAPES[7], SHAPES[8]
# The interpreter takes as long as there are groups of heads: where these are not the matter there is one.
ONE_HEAD, ONE_GROUP = Shape(1, 1, 24, 8), Shape(2, 1, 24, 8)


def mostly_slow(*fast: int) -> list[Any]:
    """All shapes; only those with these places are tested by default, as the interpreter takes seconds a shape."""
    return [pytest.param(s, marks=[] if i in fast else pytest.mark.slow) for i, s in enumerate(SHAPES)]


def check(
    batch: PagedBatch,
    device: torch.device,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    gpu: Gpu = SPLITS,
) -> None:
    """Compare with small tiles, so that short contexts have many."""
    moved = batch.moved(device, sliding_window=sliding_window, soft_cap=soft_cap)
    with poisoned_memory():
        actual = paged_attention_triton(moved, batch.max_query_len, gpu, SPLIT, CHUNK)
    assert_close(actual, paged_attention_reference(*batch.arguments(sliding_window, soft_cap)))


def batch_of(shape: Shape, lengths: list[int], query_lens: list[int]) -> PagedBatch:
    return make_batch([make_sequence(n, shape, seed=n) for n in lengths], query_lens, shape)


@pytest.mark.parametrize("gpu", [ONE_SPLIT, SPLITS], ids=["one-split", "splits"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_equal_reference(shape: Shape, gpu: Gpu, device: torch.device) -> None:
    check(batch_of(shape, [1, 130, 17], [1, 1, 1]), device, gpu=gpu)


LONG_AMONG_SHORT = [5, 9, 300, 1, 40, 7, 12, 3]
# Contexts, new tokens of each, the window and the cap, of `ONE_GROUP` if no shapes are named.
BATCHES: dict[str, tuple[list[int], list[int], int | None, float | None]] = {
    # With two heads a group, 8 query tokens fill the 16 rows of the split kernel; 9 go to the other one.
    "either side of the split": ([20, 30, 40], [8, 9, 33], None, None),
    "one long chunk": ([75], [60], None, None),
    "one long context": (LONG_AMONG_SHORT, [1] * 8, None, None),
    # A chunk beside them is the other kernel's.
    "one long context, a chunk": (LONG_AMONG_SHORT, [1, 1, 1, 1, 30, 1, 1, 1], None, None),
    "cap alone": ([50, 40], [1, 40], None, 2.0),
    "window 40 over split chunks": ([210, 61, 9], [17, 20, 9], 40, 2.0),
    "window 100 over split chunks": ([210, 61, 9], [17, 20, 9], 100, None),
    **{
        f"window {window}, {name}": ([90, 38, 70], query_lens, window, cap)
        for name, query_lens in (("decodes", [1, 1, 1]), ("mixed", [1, 38, 20]))
        for window, cap in ((1, None), (8, 2.0), (50, None))
    },
}


@pytest.mark.parametrize("name", BATCHES)
def test_batch_equals_reference(name: str, device: torch.device) -> None:
    lengths, query_lens, sliding_window, soft_cap = BATCHES[name]
    check(batch_of(ONE_GROUP, lengths, query_lens), device, sliding_window, soft_cap)


@pytest.mark.parametrize(
    ("lengths", "query_lens"),
    [([70, 27, 1, 33], [1, 27, 1, 20]), ([70, 3, 40], [3, 3, 2])],
    ids=["mixed", "verified drafts"],
)
@pytest.mark.parametrize("shape", mostly_slow(0, 10), ids=str)
def test_shapes_of_mixed_batches_equal_reference(
    shape: Shape, lengths: list[int], query_lens: list[int], device: torch.device
) -> None:
    check(batch_of(shape, lengths, query_lens), device)


@pytest.mark.parametrize("shape", [INT8, FP8], ids=str)
@pytest.mark.parametrize("query_lens", [[1, 1], [1, 38]], ids=["decodes", "mixed"])
def test_window_over_eight_bits_equals_reference(shape: Shape, query_lens: list[int], device: torch.device) -> None:
    check(batch_of(shape, [90, 38], query_lens), device, 20, 2.0)


@pytest.mark.parametrize(
    ("shape", "gpu"),
    [
        pytest.param(ONE_GROUP, SPLITS, id="one-group-splits"),
        pytest.param(SMALL, SPLITS, id="float32-splits", marks=pytest.mark.slow),
        pytest.param(FP8, SPLITS, id="fp8-splits", marks=pytest.mark.slow),
        pytest.param(SHAPES[3], ONE_SPLIT, id="float16-one-split", marks=pytest.mark.slow),
        pytest.param(INT8, ONE_SPLIT, id="int8-one-split", marks=pytest.mark.slow),
        pytest.param(SMALL, ONE_SPLIT, id="float32-one-split", marks=pytest.mark.slow),
        pytest.param(SHAPES[1], SPLITS, id="odd-heads-splits", marks=pytest.mark.slow),
        pytest.param(SHAPES[1], ONE_SPLIT, id="odd-heads-one-split", marks=pytest.mark.slow),
        pytest.param(SHAPES[3], SPLITS, id="float16-splits", marks=pytest.mark.slow),
        pytest.param(INT8, SPLITS, id="int8-splits", marks=pytest.mark.slow),
        pytest.param(FP8, ONE_SPLIT, id="fp8-one-split", marks=pytest.mark.slow),
    ],
)
def test_few_new_tokens_on_a_long_context_equal_reference(shape: Shape, gpu: Gpu, device: torch.device) -> None:
    # Contexts of many splits, of one, of a part of one, and without a query; new tokens of one block and of several.
    batch = batch_of(shape, [210, 150, 25, 20, 90], [17, 33, 9, 20, 1])
    batch.context_lens = torch.cat((batch.context_lens, torch.zeros(1, dtype=torch.int32)))
    batch.query_starts = torch.cat((batch.query_starts, batch.query_starts[-1:]))
    batch.block_tables = torch.cat((batch.block_tables, torch.zeros_like(batch.block_tables[:1])))
    check(batch, device, gpu=gpu)


@pytest.mark.parametrize("magnitude", [0.05, 1.0, 6e4])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_values_of_any_float16_magnitude_equal_reference(
    magnitude: float, cache_dtype: torch.dtype, device: torch.device
) -> None:
    """A sink of zeros takes most of the weight, as first tokens do: the rest is small."""
    shape = Shape(2, 1, 64, 16, torch.float16, cache_dtype)
    sequence = make_sequence(200, shape, seed=1)
    sequence.value = (sequence.value * magnitude / 6).clamp(-magnitude, magnitude)
    sequence.value[0] = 0
    sequence.key[0] = sequence.query[-1].mean(0) * 3
    batch = make_batch([sequence], [1], shape)
    expected = paged_attention_reference(*batch.arguments()).float()
    actual = paged_attention_triton(batch.moved(device), 1, SPLITS, SPLIT, CHUNK).float().cpu()
    torch.testing.assert_close(actual, expected, atol=1e-2 * expected.abs().max().item(), rtol=0)


def test_large_scores_stay_finite(device: torch.device) -> None:
    batch = batch_of(ONE_GROUP, [50, 40], [1, 40])
    batch.scale = 20.0
    check(batch, device, soft_cap=30.0)
    batch.scale = 1e3
    with poisoned_memory():
        attended = paged_attention_triton(batch.moved(device), 40, SPLITS, SPLIT, CHUNK)
    assert attended.isfinite().all()


@pytest.mark.parametrize("gpu", [ONE_SPLIT, SPLITS], ids=["one-split", "splits"])
def test_padding_rows_yield_zeros(gpu: Gpu, device: torch.device) -> None:
    batch = batch_of(SMALL, [40, 5, 9], [1, 1, 1])
    batch.context_lens[1:] = 0
    batch.block_tables[1:] = 0
    check(batch, device, gpu=gpu)
    assert not paged_attention_reference(*batch.arguments())[1:].any()


def test_sequences_without_queries_are_left_alone(device: torch.device) -> None:
    batch = batch_of(SMALL, [40, 5, 30, 9], [1, 1, 20, 1])
    batch.query = torch.cat((batch.query[:1], batch.query[2:22]))
    batch.query_starts = torch.tensor([0, 1, 1, 21, 21], dtype=torch.int32)
    check(batch, device)


@pytest.mark.parametrize(("window", "num_reductions"), [(20, 0), (None, 1)])
def test_short_windows_are_one_split_without_a_reduction(
    window: int | None, num_reductions: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which half of the layers of gpt-oss have: a launch less in each."""
    grids: list[object] = []
    reduce = triton_attention.reduce_splits_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return reduce[grid]

    monkeypatch.setattr(triton_attention, "reduce_splits_kernel", Counted())
    check(batch_of(SMALL, [150, 5, 90], [1, 1, 1]), device, sliding_window=window)
    assert len(grids) == num_reductions


def test_strided_query_equals_contiguous_query(device: torch.device) -> None:
    batch = batch_of(SMALL, [40, 30], [1, 20])
    wide = torch.full((21, 8, 64), float("nan"))
    wide[:, 2:6] = batch.query
    batch.query = wide[:, 2:6]
    check(batch, device)
    batch.query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    check(batch, device)


def test_reference_caps_scores() -> None:
    batch = batch_of(Shape(1, 1, 8, 4), [3], [1])
    keys, values = (
        cache[batch.block_tables[0].long()].flatten(0, 1)[:3, 0] for cache in (batch.cache.keys, batch.cache.values)
    )
    scores = 0.5 * torch.tanh(keys @ batch.query[0, 0] * batch.scale / 0.5)
    expected = torch.softmax(scores, dim=0) @ values
    torch.testing.assert_close(paged_attention_reference(*batch.arguments(soft_cap=0.5))[0, 0], expected)


def test_cpu_tensors_with_cap_equal_reference() -> None:
    batch = batch_of(SMALL, [40, 5], [1, 5])
    expected = paged_attention_reference(*batch.arguments(soft_cap=2.0))
    assert_close(paged_attention(*batch.arguments(soft_cap=2.0)), expected)


def test_splits_fill_the_gpu_but_stay_long() -> None:
    config = SplitConfig(64, 4, 3, programs_per_multiprocessor=4, min_split_tokens=128)
    assert choose_num_shares(config, 8, 132) == 66
    assert choose_num_shares(config, 1, 132) == 528
    assert most_splits(config, 66, 131072) == MAX_SPLITS
    assert most_splits(config, 20, 131072) == 32
    assert most_splits(config, 66, 1000) == 8
    assert most_splits(config, 66, 128) == 1


@triton.jit
def write_division(
    splits_ptr, query_starts_ptr, context_lens_ptr, num_seqs, num_shares, SEQS: tl.constexpr, SHAPE: tl.constexpr
) -> None:
    tiles_per_split, splits = divide_sequences(
        query_starts_ptr, context_lens_ptr, num_seqs, num_shares, 1, 2, 64, SEQS, 64, SHAPE
    )
    tl.store(splits_ptr + tl.arange(0, SEQS), splits)
    tl.store(splits_ptr + SEQS + tl.arange(0, SEQS), tiles_per_split)


@pytest.mark.parametrize(
    ("context_lens", "longest"),
    [([102_400] + [1024] * 63, 40), ([1024] * 64, 16), ([1024] * 256, 63), ([131_072], 32), ([0, 5, 64, 65], 2)],
    ids=["one long", "all alike", "many", "alone", "tiny"],
)
def test_sequences_are_divided_by_their_share_of_all_tokens(
    context_lens: list[int], longest: int, device: torch.device
) -> None:
    """No program has more tiles than a share, 66 of which are the batch: the long context does not end last."""
    num_seqs = len(context_lens)
    size = 1 << (num_seqs - 1).bit_length()
    division = torch.zeros(2, size, dtype=torch.int32, device=device)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    shape = SimpleNamespace(sliding_window=0, chunk=0, step=1)
    write_division[(1,)](division, starts, lens, num_seqs, 66, size, shape)
    splits, tiles_per_split = (row[:num_seqs].tolist() for row in division)
    tiles = [-(-length // 64) for length in context_lens]
    assert splits == [max(1, -(-count // each)) for count, each in zip(tiles, tiles_per_split, strict=True)]
    assert max(tiles_per_split) == max(longest, 2)
    assert sum(splits) <= num_seqs + 66


def test_chunks_are_split_where_programs_are_too_few() -> None:
    config = ChunkConfig(128, 64, 8, 3, programs_per_multiprocessor=2, min_split_tokens=512)
    # 17 and 128 tokens of Llama-3-8B on a context of 32k, a prompt of 512, one of 8192.
    assert choose_num_chunk_splits(config, 8 * 1, 32_768, 132) == MAX_CHUNK_SPLITS
    assert choose_num_chunk_splits(config, 8 * 5, 32_768, 132) == 6
    assert choose_num_chunk_splits(config, 8 * 5, 1024, 132) == 2
    assert choose_num_chunk_splits(config, 8 * 17, 32_768, 132) == 1
    assert choose_num_chunk_splits(config, 8 * 257, 32_768, 132) == 1


def test_unsupported_shapes_are_refused() -> None:
    values = torch.empty(1, 16, 1, 512)
    assert can_run(torch.empty(1, 128, 576), values)
    assert not can_run(torch.empty(1, 1, 584), values)
    assert not can_run(torch.empty(1, 1, 576), torch.empty(1, 16, 1, 520))


def check_dispatched(
    batch: PagedBatch, device: torch.device, sliding_window: int | None, soft_cap: float | None
) -> None:
    """Compare with the tiles of the launch tables."""
    moved = batch.moved(device, sliding_window=sliding_window, soft_cap=soft_cap)
    where = (moved.block_tables, moved.query_starts, moved.context_lens, batch.max_query_len, batch.max_context_len)
    with poisoned_memory():
        actual = paged_attention(moved.query, moved.cache, *where, moved.options)
    assert_close(actual, paged_attention_reference(*batch.arguments(sliding_window, soft_cap)))


@pytest.mark.gpu
@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(None, None), (100, None), (None, 30.0), (1000, 30.0)])
@pytest.mark.parametrize(
    "query_lens", [[1, 1, 1, 1], [5, 5, 2, 5], [1, 700, 1, 333]], ids=["decodes", "drafts", "mixed"]
)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_bfloat16_batch_equals_reference(
    shape: Shape, query_lens: list[int], sliding_window: int | None, soft_cap: float | None, device: torch.device
) -> None:
    check_dispatched(batch_of(shape, [2500, 700, 17, 1333], query_lens), device, sliding_window, soft_cap)


@pytest.mark.gpu
def test_odd_large_batch_equals_reference(device: torch.device) -> None:
    lengths = torch.randint(1, 300, (201,), generator=torch.Generator().manual_seed(0)).tolist()
    check_dispatched(batch_of(GPU_SHAPES[7], lengths, [1] * 201), device, None, None)


@pytest.mark.gpu
def test_blocks_beyond_32_bits_equal_reference(device: torch.device) -> None:
    batch = batch_of(GPU_SHAPES[7], [100, 50], [1, 50])
    keys, moved = batch.cache.keys, batch.moved(device)
    num_blocks = 2**31 // keys[0].numel() + len(keys)
    caches = torch.empty(2, num_blocks, *keys.shape[1:], dtype=torch.bfloat16, device=device)
    shift = num_blocks - len(keys)
    caches[0, shift:], caches[1, shift:] = moved.cache.keys, moved.cache.values
    moved = replace(moved, cache=LayerCache(*caches), block_tables=moved.block_tables + shift)
    actual = paged_attention_triton(moved, 50, gpu_of(moved.query.device))
    assert_close(actual, paged_attention_reference(*batch.arguments()))


@pytest.mark.gpu
def test_captured_decode_follows_changed_lengths(device: torch.device) -> None:
    batches = [batch_of(GPU_SHAPES[7], lengths, [1] * 4) for lengths in ([900, 3, 40, 1], [5, 900, 77, 2])]
    batches[1].context_lens[3] = 0
    size = (80, *batches[0].cache.keys.shape[1:])
    # As wide as the longest context that may come, whatever the contexts were at capture.
    static = replace(
        batches[0].moved(device),
        cache=LayerCache(*(torch.full(size, float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2))),
        block_tables=torch.zeros(4, 256, dtype=torch.int32, device=device),
        context_lens=torch.zeros(4, dtype=torch.int32, device=device),
    )
    gpu = gpu_of(static.query.device)
    paged_attention_triton(static, 1, gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = paged_attention_triton(static, 1, gpu)
    for batch in batches:
        static.query.copy_(batch.query)
        for own, cached in zip(static.cache.tensors, batch.cache.tensors, strict=True):
            own[: len(cached)] = cached.to(device)
        static.block_tables[:, : batch.block_tables.shape[1]] = batch.block_tables.to(device)
        static.context_lens.copy_(batch.context_lens)
        graph.replay()
        assert_close(result, paged_attention_reference(*batch.arguments()))
