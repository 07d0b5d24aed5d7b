"""Attention to every second or third token, merged, is attention to all: every variant, every implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.cpu_library import cpu_library
from kernels.gpu_config import is_triton_installed
from kernels.layer_cache import CachedTokens, LayerCache
from kernels.paged_attention import AttentionOptions, Partial, merge_partials
from kernels.paged_attention.dispatch import can_run, paged_attention, paged_attention_cpu
from kernels.paged_attention.reference import paged_attention_reference
from tests.kernels.attention_variants import OPTIONS, QUERIES, Options, batch_of, mostly_slow, run_reference
from tests.kernels.layer_caches import transposed
from tests.kernels.paged_batch import PagedBatch, PagedSequence, Shape, make_batch, make_sequence
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.tolerances import assert_close

SHAPES = [
    Shape(4, 2, 64, 16), Shape(6, 2, 40, 5), Shape(3, 3, 128, 32), Shape(20, 1, 16, 16), Shape(7, 1, 8, 3),
    Shape(8, 8, 256, 16), Shape(4, 2, 64, 16, torch.bfloat16), Shape(4, 2, 24, 7, torch.float16),
    Shape(4, 1, 96, 16, torch.bfloat16, torch.float32),
    Shape(4, 2, 64, 16, torch.float32, torch.int8),
    Shape(6, 2, 40, 5, torch.bfloat16, torch.int8),
    Shape(3, 3, 128, 32, torch.bfloat16, torch.float8_e4m3fn),
    Shape(7, 1, 8, 3, torch.float16, torch.float8_e4m3fn),
]  # fmt: skip
# As many query heads as KV heads, and a block of several vectors of tokens.
SQUARE = Shape(3, 3, 34, 48, torch.bfloat16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def run_kernel(batch: PagedBatch, sliding_window: int | None = None) -> torch.Tensor:
    library = cpu_library()
    assert library is not None, "the tests need g++"
    assert can_run(batch.query, batch.cache)
    return paged_attention_cpu(library, *batch.tensors, AttentionOptions(batch.scale, sliding_window))


def mixed_batch(shape: Shape) -> PagedBatch:
    lengths, query_lens = [7, 33, 100, 1, 17], [1, 33, 20, 1, 2]
    return make_batch([make_sequence(n, shape, seed=n) for n in lengths], query_lens, shape)


@pytest.mark.parametrize("sliding_window", [None, 1, 8, 50])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_batch_equals_reference(shape: Shape, sliding_window: int | None) -> None:
    batch = mixed_batch(shape)
    expected = paged_attention_reference(*batch.arguments(sliding_window))
    assert not expected.isnan().any()
    actual = run_kernel(batch, sliding_window)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])


def test_reference_equals_torch_attention() -> None:
    shape = Shape(6, 2, 40, 5)
    sequence = make_sequence(23, shape, seed=1)
    batch = make_batch([sequence], [23], shape)
    heads_first = (tensor.transpose(0, 1) for tensor in (sequence.query, sequence.key, sequence.value))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(paged_attention_reference(*batch.arguments()), expected.transpose(0, 1))


def test_soft_cap_bounds_the_scores_on_a_cpu() -> None:
    shape, soft_cap = Shape(4, 2, 16, 5), 0.5
    sequence = make_sequence(23, shape, seed=1)
    batch = make_batch([sequence], [23], shape)
    query, key, value = (tensor.transpose(0, 1) for tensor in (sequence.query, sequence.key, sequence.value))
    key, value = (tensor.repeat_interleave(2, dim=0) for tensor in (key, value))
    scores = soft_cap * torch.tanh(query @ key.transpose(1, 2) * batch.scale / soft_cap)
    hidden = torch.ones(23, 23, dtype=torch.bool).triu(1)
    expected = (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(0, 1)
    torch.testing.assert_close(paged_attention(*batch.arguments(soft_cap=soft_cap)), expected, atol=1e-5, rtol=1e-5)


def test_large_scores_stay_finite() -> None:
    shape = Shape(4, 2, 64, 16)
    batch = mixed_batch(shape)
    batch.scale = 100.0
    expected = paged_attention_reference(*batch.arguments())
    torch.testing.assert_close(run_kernel(batch), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_does_not_depend_on_batch_or_chunk(shape: Shape, sliding_window: int | None) -> None:
    sequences = [make_sequence(n, shape, seed=n) for n in (70, 5, 33)]
    together = run_kernel(make_batch(sequences, [70, 5, 33], shape), sliding_window)
    for length in (1, 2, 16, 17, 64, 70):
        target = make_sequence(70, shape, seed=70)
        target.key, target.value, target.query = (t[:length] for t in (target.key, target.value, target.query))
        for chunk in (1, 3, length):
            if chunk <= length:
                alone = run_kernel(make_batch([target], [chunk], shape, seed=length), sliding_window)
                assert torch.equal(alone, together[length - chunk : length])


@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize("shape", [*(shape for shape in SHAPES if shape.block_size % 16 == 0), SQUARE], ids=str)
def test_transposed_keys_change_no_bit(shape: Shape, sliding_window: int | None) -> None:
    lengths = [7, 33, 300, 1, 17, 130]
    sequences = [make_sequence(n, shape, seed=n) for n in lengths]
    for query_lens in ([1, 33, 20, 1, 2, 130], [1] * 6):
        batch = make_batch(sequences, query_lens, shape)
        expected = run_kernel(batch, sliding_window)
        batch.cache = replace(batch.cache, keys=transposed(batch.cache.keys))
        assert batch.cache.keys.stride(1) == 1
        assert torch.equal(run_kernel(batch, sliding_window), expected)


def test_reference_reads_transposed_keys() -> None:
    batch = mixed_batch(SHAPES[0])
    expected = paged_attention_reference(*batch.arguments())
    batch.cache = replace(batch.cache, keys=transposed(batch.cache.keys))
    torch.testing.assert_close(paged_attention_reference(*batch.arguments()), expected)


def test_thread_count_does_not_change_bits() -> None:
    shape = Shape(4, 2, 64, 16)
    batch = make_batch([make_sequence(n, shape, seed=n) for n in (300, 200)], [300, 200], shape)
    num_threads = torch.get_num_threads()
    parallel = run_kernel(batch)
    try:
        torch.set_num_threads(1)
        assert torch.equal(run_kernel(batch), parallel)
    finally:
        torch.set_num_threads(num_threads)


def test_strided_query_equals_contiguous_query() -> None:
    shape = Shape(4, 2, 64, 16)
    batch = mixed_batch(shape)
    expected = run_kernel(batch)
    fused = torch.full((len(batch.query), 8 * 64), float("nan"))
    fused[:, 64:320] = batch.query.flatten(1)
    batch.query = fused[:, 64:320].view(-1, 4, 64)
    assert not batch.query.is_contiguous()
    actual = run_kernel(batch)
    assert actual.is_contiguous()
    assert torch.equal(actual, expected)
    batch.query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(run_kernel(batch), expected)


def test_unsupported_head_dim_is_refused() -> None:
    keys, values = torch.empty(1, 16, 1, 576), torch.empty(1, 16, 1, 512)
    assert can_run(torch.empty(1, 1, 576), LayerCache(keys, values))
    assert not can_run(torch.empty(1, 1, 584), LayerCache(torch.empty(1, 16, 1, 584), values))
    assert not can_run(torch.empty(1, 1, 576), LayerCache(keys, torch.empty(1, 16, 1, 520)))
    assert not can_run(torch.empty(1, 1, 576, dtype=torch.float64), LayerCache(keys, values))
    assert not can_run(torch.empty(1, 1, 576), LayerCache(keys.to(torch.uint8), values))
    assert not can_run(torch.empty(1, 1, 576, device="meta"), LayerCache(keys, values))


def test_layouts_that_the_kernel_does_not_read_are_refused() -> None:
    query, values = torch.empty(1, 2, 6), torch.empty(3, 16, 2, 6)
    assert can_run(query, LayerCache(transposed(values), values))
    assert not can_run(query, LayerCache(values, transposed(values)))
    assert not can_run(query, LayerCache(values.transpose(2, 3).contiguous().transpose(2, 3), values))
    assert not can_run(query, LayerCache(transposed(values[:, :8]), values[:, :8]))
    assert not can_run(query[..., :5], LayerCache(transposed(values[..., :5]), values[..., :5]))


@pytest.mark.parametrize("sliding_window", [None, 3])
def test_padding_rows_yield_zeros(sliding_window: int | None) -> None:
    batch = make_batch([make_sequence(n, SHAPES[0], seed=n) for n in (40, 5, 9)], [1, 1, 1], SHAPES[0])
    batch.context_lens[1:] = 0
    actual = run_kernel(batch, sliding_window)
    torch.testing.assert_close(actual, paged_attention_reference(*batch.arguments(sliding_window)))
    assert actual[0].any()
    assert not actual[1:].any()


FORMS = {
    "same": Shape(4, 2, 24, 5),
    "transposed keys": Shape(4, 2, 24, 16),
    "values of another size": Shape(6, 2, 24, 4, value_dim=16),
    "latent": Shape(4, 1, 72, 4, value_dim=64, is_latent=True),
    "int8": Shape(4, 2, 32, 4, torch.float32, torch.int8),
    "float16": Shape(2, 1, 24, 8, torch.float16),
}
Attend = Callable[[PagedBatch, Options, Partial], torch.Tensor]


def reference(batch: PagedBatch, options: Options, partial: Partial) -> torch.Tensor:
    return paged_attention_reference(*batch.arguments(**options.asked(batch.query.shape[1])), partial)


def compiled(batch: PagedBatch, options: Options, partial: Partial) -> torch.Tensor:
    library = cpu_library()
    assert library is not None, "the tests need g++"
    asked = AttentionOptions(batch.scale, **options.asked(batch.query.shape[1]))
    return paged_attention_cpu(library, *batch.tensors, asked, partial)


def triton(batch: PagedBatch, options: Options, partial: Partial, device: torch.device) -> torch.Tensor:
    from tests.kernels.test_attention_variants_triton import CHUNK, SPLIT, SPLITS, paged_attention_triton

    moved = batch.moved(device, partial, **options.asked(batch.query.shape[1]))
    result = paged_attention_triton(moved, batch.max_query_len, SPLITS, SPLIT, CHUNK)
    assert moved.partial is not None
    partial.lse.copy_(moved.partial.lse)
    return result.cpu()


def part_of(shape: Shape, queries: str, tokens: CachedTokens) -> PagedBatch:
    """Make a cache of some tokens of the sequences that `batch_of` has."""
    lengths, query_lens = QUERIES[queries]
    whole = [make_sequence(length, shape, seed=length) for length in lengths]
    kept = [
        PagedSequence(each.query, *(heads[tokens.first :: tokens.step] for heads in (each.key, each.value)))
        for each in whole
    ]
    lens = torch.tensor(lengths, dtype=torch.int32)
    return replace(make_batch(kept, query_lens, shape), context_lens=lens, max_context_len=max(lengths))


def check(attend: Attend, shape: Shape, options: Options, queries: str, step: int) -> None:
    values, lse = [], []
    for first in range(step):
        batch = part_of(shape, queries, CachedTokens(first, step))
        partial = Partial(CachedTokens(first, step), torch.full(batch.query.shape[:2], float("nan")))
        with poisoned_memory():
            values.append(attend(batch, options, partial))
        lse.append(partial.lse)
    assert values[0].dtype is torch.float32
    merged = merge_partials(torch.stack(values), torch.stack(lse), options.sinks(shape.num_heads))
    assert_close(merged.to(shape.dtype), run_reference(batch_of(shape, queries), options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("attend", [reference, compiled])
def test_parts_come_to_attention_to_all_tokens(attend: Attend, shape: Shape, options: Options) -> None:
    for queries, step in (("decodes", 2), ("mixed", 2), ("mixed", 3)):
        check(attend, shape, options, queries, step)


FAST = {("same", "all", "decodes"), ("latent", "plain", "decodes"), ("float16", "window", "mixed")}


@pytest.mark.skipif(not is_triton_installed(), reason="Triton does not support this platform")
@pytest.mark.parametrize(("shape", "options", "queries"), mostly_slow(FORMS, FAST))
def test_parts_of_a_gpu_come_to_attention_to_all_tokens(
    shape: Shape, options: Options, queries: str, device: torch.device
) -> None:
    check(lambda batch, options, partial: triton(batch, options, partial, device), shape, options, queries, 2)
