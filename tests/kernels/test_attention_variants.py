"""Every variant of attention in every implementation: the reference against the definition, kernels against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cpu_library import cpu_library
from kernels.paged_attention import paged_attention
from kernels.paged_attention.dispatch import can_run, paged_attention_cpu
from tests.kernels.attention_variants import OPTIONS, QUERIES, Options, attend_trees_by_definition, run_reference
from tests.kernels.paged_batch import Shape, make_sequence
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.token_trees import Tree, random_tree, tree_batch

FORMS = {
    "same": Shape(4, 2, 24, 5),
    "values of another size": Shape(6, 2, 24, 4, value_dim=16),
    "larger values": Shape(4, 1, 16, 4, value_dim=40),
    "latent": Shape(4, 1, 36, 4, value_dim=32, is_latent=True),
    "strided": Shape(4, 2, 24, 4, is_strided=True),
}
TREES = [random_tree(60, 20, seed=1, num_before=9), Tree(7), random_tree(90, 5, seed=3), Tree(33, num_before=17)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_reference_equals_definition(shape: Shape, options: Options) -> None:
    for trees in (TREES, [Tree(n, num_before=count) for n, count in zip(*QUERIES["mixed"], strict=True)]):
        batch, masks = tree_batch(trees, shape)
        if trees is TREES and options.sliding_window is not None:
            continue  # Windows over trees are exact from 64 tokens on.
        sequences = [make_sequence(tree.length, shape, seed=tree.length) for tree in trees]
        expected = attend_trees_by_definition(sequences, trees, options)
        tree_masks = masks if trees is TREES else None
        torch.testing.assert_close(run_reference(batch, options, tree_masks).double(), expected, atol=1e-5, rtol=1e-5)


# What the kernels' tiles and panels make of sizes: large heads, more heads than an item has rows, caches in eight bits.
SIZES = {
    "latent of DeepSeek": Shape(16, 1, 576, 16, torch.bfloat16, None, 512, is_latent=True),
    "large heads": Shape(4, 2, 512, 16),
    "many heads": Shape(40, 1, 576, 8, torch.float32, None, 512, is_latent=True),
    "latent in int8": Shape(6, 1, 72, 8, torch.float32, torch.int8, 64, is_latent=True),
    "values in fp8": Shape(6, 2, 48, 4, torch.float32, torch.float8_e4m3fn, 32, is_strided=True),
    "keys of 192": Shape(4, 4, 192, 16, torch.float16, None, 128),
    "values in int8": Shape(6, 2, 24, 5, torch.bfloat16, torch.int8, 40),
}
FAST = {("latent of DeepSeek", "plain"), ("many heads", "all"), ("latent in int8", "all"), ("values in fp8", "sinks")}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def mostly_slow(fast: set[tuple[str, str]]) -> list[Any]:
    """Every size with every variant; only those named are tested by default."""
    return [
        pytest.param(shape, options, id=f"{size}-{name}", marks=[] if (size, name) in fast else pytest.mark.slow)
        for size, shape in SIZES.items()
        for name, options in OPTIONS.items()
    ]


def check_dispatched(shape: Shape, options: Options) -> None:
    chunks = [Tree(n, num_before=count) for n, count in zip(*QUERIES["mixed"], strict=True)]
    for trees in (chunks, TREES):
        batch, masks = tree_batch(trees, shape)
        tree_masks = masks if trees is TREES else None
        variant = (options.sinks(shape.num_heads), options.chunk_size)
        window_and_cap = (options.sliding_window, options.soft_cap)
        with poisoned_memory():
            actual = paged_attention(*batch.arguments(), *window_and_cap, batch.kv_scales, tree_masks, *variant)
        tolerance = TOLERANCE[shape.dtype]
        expected = run_reference(batch, options, tree_masks)
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_dispatched_attention_equals_reference(shape: Shape, options: Options) -> None:
    check_dispatched(shape, options)


@pytest.mark.parametrize(("shape", "options"), mostly_slow(FAST))
def test_attention_of_any_size_equals_reference(shape: Shape, options: Options) -> None:
    check_dispatched(shape, options)


@pytest.mark.parametrize(("shape", "options"), [(SIZES["many heads"], OPTIONS["all"]), (FORMS["same"], OPTIONS["all"])])
def test_row_of_a_variant_does_not_depend_on_its_chunk(shape: Shape, options: Options) -> None:
    library = cpu_library()
    assert library is not None, "the tests need g++"

    def run(num_before: int) -> torch.Tensor:
        batch = tree_batch([Tree(60, num_before=num_before)], shape)[0]
        assert can_run(batch.query, batch.key_cache, batch.value_cache)
        tensors = (batch.query, batch.key_cache, batch.value_cache)
        integers = (batch.block_tables, batch.query_starts, batch.context_lens)
        variant = (options.soft_cap, options.sinks(shape.num_heads), options.chunk_size)
        return paged_attention_cpu(
            library, *tensors, *integers, batch.scale, options.sliding_window, None, None, *variant
        )

    together = run(60)
    for num_before in (1, 2, 7):
        assert torch.equal(run(num_before), together[-num_before:])


def test_sink_of_no_weight_changes_nothing() -> None:
    batch = tree_batch([Tree(40, num_before=20)], FORMS["same"])[0]
    none = torch.full((4,), float("-inf"))
    torch.testing.assert_close(paged_attention(*batch.arguments(), sinks=none), paged_attention(*batch.arguments()))
