"""Every variant of attention in every implementation: the reference against the definition, kernels against it."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention import paged_attention
from tests.kernels.attention_variants import OPTIONS, QUERIES, Options, attend_trees_by_definition, run_reference
from tests.kernels.paged_batch import Shape, make_sequence
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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_dispatched_attention_equals_reference(shape: Shape, options: Options) -> None:
    for trees in (None, TREES):
        named = trees or [Tree(n, num_before=count) for n, count in zip(*QUERIES["mixed"], strict=True)]
        batch, masks = tree_batch(named, shape)
        tree_masks = None if trees is None else masks
        sinks = options.sinks(shape.num_heads)
        actual = paged_attention(
            *batch.arguments(),
            options.sliding_window,
            options.soft_cap,
            batch.kv_scales,
            tree_masks,
            sinks,
            options.chunk_size,
        )
        torch.testing.assert_close(actual, run_reference(batch, options, tree_masks), atol=1e-5, rtol=1e-5)
