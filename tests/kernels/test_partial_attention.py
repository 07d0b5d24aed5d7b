"""Attention to every second or third token, merged, is attention to all: every variant, every implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.cpu_library import cpu_library
from kernels.gpu_config import is_triton_installed
from kernels.layer_cache import CachedTokens
from kernels.paged_attention import AttentionOptions, Partial, merge_partials
from kernels.paged_attention.dispatch import paged_attention_cpu
from kernels.paged_attention.reference import paged_attention_reference
from tests.kernels.attention_variants import OPTIONS, QUERIES, Options, batch_of, mostly_slow, run_reference
from tests.kernels.paged_batch import PagedBatch, PagedSequence, Shape, make_batch, make_sequence
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.tolerances import assert_close

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
