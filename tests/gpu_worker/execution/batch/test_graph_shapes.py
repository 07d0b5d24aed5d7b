from __future__ import annotations

from itertools import pairwise

import pytest

from gpu_worker.execution.batch.graph_shapes import MAX_VERIFIED_ROWS, GraphShape, bucket_sizes, graph_shapes


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 40, 64, 100, 256, 300, 512])
def test_buckets_grow_to_the_largest_batch_and_waste_little(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    for before, size in pairwise(sizes):
        assert size - before <= max(8, before // 4)


@pytest.mark.parametrize("most", [1, 5, 64, 256, 512])
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 4, 5, 7, 63])
def test_shapes_with_drafts_are_few_and_bounded_and_the_deepest_drafts_have_their_own(
    most: int, num_drafts: int
) -> None:
    shapes = graph_shapes(most, num_drafts)
    assert len(shapes) == len(set(shapes))
    assert [shape for shape in shapes if shape.query_len == 1] == [GraphShape(size) for size in bucket_sizes(most)]
    with_drafts = [shape for shape in shapes if shape.query_len > 1]
    assert bool(with_drafts) == bool(num_drafts)
    assert len(with_drafts) <= 9 * num_drafts.bit_length()
    if with_drafts:
        assert max(shape.num_tokens for shape in with_drafts) <= MAX_VERIFIED_ROWS
        assert max(shape.num_seqs for shape in with_drafts) <= most
        assert max(shape.query_len for shape in with_drafts) == 1 + num_drafts
