from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from gpu_worker.execution.batch.graph_shapes import (
    MAX_VERIFIED_ROWS,
    CapturedSteps,
    bucket_sizes,
    decode_shape,
    graph_shapes,
    mixed_shape,
)


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
    shapes = graph_shapes(CapturedSteps.DECODE, most, 8192, num_drafts)
    assert len(shapes) == len(set(shapes))
    assert [shape for shape in shapes if shape.query_len == 1] == [decode_shape(size) for size in bucket_sizes(most)]
    with_drafts = [shape for shape in shapes if shape.query_len > 1]
    assert bool(with_drafts) == bool(num_drafts)
    assert len(with_drafts) <= 9 * num_drafts.bit_length()
    if with_drafts:
        assert max(shape.num_tokens for shape in with_drafts) <= MAX_VERIFIED_ROWS
        assert max(shape.num_seqs for shape in with_drafts) <= most
        assert max(shape.query_len for shape in with_drafts) == 1 + num_drafts


def test_nothing_is_captured_that_was_switched_off() -> None:
    assert graph_shapes(CapturedSteps.OFF, 256, 8192, 5) == []
    assert all(shape.has_logits for shape in graph_shapes(CapturedSteps.DECODE, 256, 8192, 5))


@pytest.mark.parametrize("num_drafts", [0, 5])
@pytest.mark.parametrize("most", [1, 16, 40, 256, 300])
@pytest.mark.parametrize("most_tokens", [512, 600, 1024, 2048, 8192])
def test_steps_of_2048_tokens_are_captured_where_launches_are_many(
    most: int, most_tokens: int, num_drafts: int
) -> None:
    arguments = CapturedSteps.ALL, most, most_tokens, num_drafts
    small, all_shapes = graph_shapes(*arguments), graph_shapes(*arguments, has_many_launches=True)
    added = all_shapes[len(small) :]
    assert all_shapes[: len(small)] == small or most_tokens == 600
    assert len(all_shapes) == len(set(all_shapes)) <= len(small) + 8
    assert {shape.num_tokens for shape in added} <= {600, 768, 1024, 1536, 2048}
    largest = min(most_tokens, 2048)
    for num_tokens in range(513, largest + 1):
        held = [
            shape
            for shape in all_shapes
            if not shape.has_logits and shape.holds(num_tokens, min(most, 256), num_tokens)
        ]
        # A third of a step is padding at most.
        assert min(shape.num_tokens for shape in held) <= 1.5 * num_tokens
    assert not any(shape.num_tokens > largest for shape in added)
    assert graph_shapes(CapturedSteps.DECODE, *arguments[1:], has_many_launches=True) == graph_shapes(
        CapturedSteps.DECODE, *arguments[1:]
    )


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("most_tokens", [600, 2048, 8192])
def test_new_prompts_up_to_2048_tokens_have_a_captured_step_with_room_for_their_blocks(
    most_tokens: int, block_size: int
) -> None:
    """Alone, or as eight of any lengths; of a prompt twice as long no graph makes keys and values."""
    arguments, settings = (CapturedSteps.ALL, 256, most_tokens, 0), {"has_many_launches": True}
    plain = graph_shapes(*arguments, **settings)
    shapes = graph_shapes(*arguments, **settings, expanded_block_size=block_size)
    expanded = [shape for shape in shapes if shape.num_expanded_blocks]
    assert [shape for shape in shapes if not shape.num_expanded_blocks] == plain
    assert len(expanded) == {600: 3, 2048: 6, 8192: 6}[most_tokens]
    for num_tokens in range(256, min(most_tokens, 2048) + 1):
        for num_seqs, num_blocks in ((1, -(-num_tokens // block_size)), (8, num_tokens // block_size + 8)):
            held = [shape for shape in expanded if shape.holds(num_tokens, num_seqs, num_tokens, num_blocks)]
            assert held
            assert min(shape.num_tokens for shape in held) <= 1.5 * num_tokens
    assert not any(shape.holds(512, 1, 512, 4096 // block_size) for shape in expanded)
    # Neither form stands for the other.
    assert not any(shape.holds(300, 1, 300) for shape in expanded)
    assert not any(shape.holds(300, 1, 300, 1) for shape in plain)


@pytest.mark.parametrize("most", [1, 3, 4, 5, 64, 200, 256, 300, 8192])
@pytest.mark.parametrize("most_tokens", [1, 63, 64, 100, 512, 513, 8192])
@pytest.mark.parametrize("num_drafts", [0, 5])
def test_mixed_shapes_hold_every_small_step_and_are_few(most: int, most_tokens: int, num_drafts: int) -> None:
    shapes = graph_shapes(CapturedSteps.ALL, most, most_tokens, num_drafts)
    decodes = graph_shapes(CapturedSteps.DECODE, most, most_tokens, num_drafts)
    mixed = [shape for shape in shapes if not shape.has_logits]
    assert shapes == decodes + mixed
    assert len(mixed) == len(set(mixed)) <= 19
    for shape in mixed:
        assert shape == mixed_shape(shape.num_tokens, shape.num_seqs, has_drafts=num_drafts > 0)
        assert shape.num_seqs <= min(most, shape.num_tokens)
        assert shape.num_tokens <= min(most_tokens, 512)
    mixed.sort(key=lambda shape: (shape.num_tokens, shape.num_seqs))
    # Of all steps at once: [num_tokens, num_seqs, shape].
    num_tokens = np.arange(1, min(most_tokens, 512) + 1)[:, None, None]
    num_seqs = np.arange(1, min(most, most_tokens, 256) + 1)[None, :, None]
    shape_tokens, shape_seqs = np.array([(shape.num_tokens, shape.num_seqs) for shape in mixed]).T
    is_step = (num_seqs <= num_tokens)[..., 0]
    fits = (shape_tokens >= num_tokens) & (shape_seqs >= num_seqs)
    assert fits.any(axis=-1)[is_step].all()
    smallest = fits.argmax(axis=-1)
    assert (shape_tokens[smallest] - num_tokens[..., 0] < 128)[is_step].all()
    assert (shape_seqs[smallest] <= np.maximum(4, 4 * (num_seqs[..., 0] - 1)))[is_step].all()
