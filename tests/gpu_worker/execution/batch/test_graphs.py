from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from gpu_worker.execution.batch.graph_shapes import (
    MAX_VERIFIED_ROWS,
    CapturedSteps,
    GraphShape,
    bucket_sizes,
    decode_shape,
    graph_shapes,
    mixed_shape,
)
from gpu_worker.execution.batch.graphs import ComputedRows, StepGraphs
from gpu_worker.execution.batch.step_table import DeviceStep, HostStep

CPU = torch.device("cpu")
SPARE = 11


def decode(rows: list[int], lengths: list[int] | None = None) -> HostStep:
    """Tokens of sequences, one each unless told; the numbers only have to be told apart."""
    lengths = lengths or [1] * len(rows)
    row_numbers = np.array(rows, dtype=np.int64)
    numbers = np.arange(sum(lengths), dtype=np.int64)
    starts = np.array([0, *np.cumsum(lengths)], dtype=np.int32)
    context_lens = np.arange(len(rows), dtype=np.int32) + 30
    return HostStep(
        numbers + 10,
        np.repeat(row_numbers, lengths),
        numbers + 20,
        numbers + 40,
        row_numbers,
        starts,
        context_lens,
        max_query_len=max(lengths),
    )


def make_graphs(shapes: list[GraphShape]) -> tuple[StepGraphs, list[DeviceStep]]:
    seen: list[DeviceStep] = []

    def body(step: DeviceStep, shape: GraphShape) -> ComputedRows:
        seen.append(step)
        logits = step.token_ids[:, None].float() if shape.has_logits else None
        return ComputedRows(step.positions[:, None].float(), logits)

    graphs = StepGraphs(body, shapes, SPARE, CPU)
    progress: list[tuple[int, int]] = []
    graphs.capture(lambda *counts: progress.append(counts))
    assert progress == [(done, len(shapes)) for done in range(1, len(shapes) + 1)]
    return graphs, seen


PLAIN = [decode_shape(size) for size in (1, 2, 4, 8, 11)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 11])
def test_batch_is_padded_with_sequences_that_have_no_tokens(count: int) -> None:
    graphs, seen = make_graphs(PLAIN)
    # A larger step first, whose leftovers must not be taken for a part of this one.
    graphs.run(decode_shape(11), decode(list(range(11))))
    rows = list(range(count))[::-1]
    size = next(size for size in (1, 2, 4, 8, 11) if size >= count)
    shape = graphs.shape_for(decode(rows), is_decode=True)
    assert shape == decode_shape(size)
    computed = graphs.run(shape, decode(rows))
    step = seen[-1]
    padding = size - count
    assert computed.logits is not None
    assert computed.logits[:, 0].tolist() == [10 + place for place in range(count)]
    assert computed.hidden[:, 0].tolist() == [20 + place for place in range(count)]
    assert step.token_rows.tolist() == step.rows.tolist() == rows + [SPARE] * padding
    assert step.positions.tolist() == [20 + place for place in range(count)] + [0] * padding
    assert step.slots.tolist() == [40 + place for place in range(count)] + [-1] * padding
    assert step.context_lens.tolist() == [30 + place for place in range(count)] + [0] * padding
    assert step.query_starts.tolist() == list(range(size + 1))
    assert step.query_starts.dtype == step.context_lens.dtype == torch.int32


def test_sequences_with_drafts_are_padded_and_tokens_may_be_left_over() -> None:
    graphs, seen = make_graphs([*PLAIN, decode_shape(4, 4)])
    full = decode(list(range(4)), [4] * 4)
    graphs.run(decode_shape(4, 4), full)
    step = decode([5, 2, 7], [3, 1, 4])
    assert graphs.shape_for(step, is_decode=True) == decode_shape(4, 4)
    computed = graphs.run(decode_shape(4, 4), step)
    tensors = seen[-1]
    assert computed.logits is not None
    assert computed.logits[:, 0].tolist() == [10 + place for place in range(8)]
    assert tensors.max_query_len == 4
    assert tensors.query_starts.tolist() == [0, 3, 4, 8, 9]
    assert tensors.context_lens.tolist() == [30, 31, 32, 0]
    assert tensors.slots.tolist() == [*range(40, 48)] + [-1] * 8
    assert tensors.rows.tolist() == [5, 2, 7, SPARE]
    assert tensors.token_rows.tolist() == [5, 5, 5, 2, 7, 7, 7, 7] + [SPARE] * 8


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1] * 5, decode_shape(8)),
        ([2], decode_shape(1, 2)),
        ([2, 1, 1], decode_shape(4, 2)),
        ([3, 1], decode_shape(2, 6)),
        ([6] * 3, None),
        ([7], None),
        ([2] * 5, None),
        ([1] * 12, None),
    ],
)
def test_smallest_shape_that_holds_a_step_is_taken(lengths: list[int], expected: GraphShape | None) -> None:
    shapes = [*PLAIN, decode_shape(1, 2), decode_shape(4, 2), decode_shape(1, 6), decode_shape(2, 6)]
    graphs, _ = make_graphs(shapes)
    assert graphs.shape_for(decode(list(range(len(lengths))), lengths), is_decode=True) == expected


MIXED = [mixed_shape(8, 2, has_drafts=False), mixed_shape(8, 5, has_drafts=False), mixed_shape(16, 5, has_drafts=False)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1], MIXED[0]),
        ([7, 1], MIXED[0]),
        ([6, 1, 1], MIXED[1]),
        ([8, 1], MIXED[2]),
        ([16], MIXED[2]),
        ([17], None),
        ([1] * 6, None),
    ],
)
def test_step_with_prompt_tokens_takes_a_shape_without_logits(lengths: list[int], expected: GraphShape | None) -> None:
    graphs, _ = make_graphs([*PLAIN, *MIXED, decode_shape(4, 4)])
    step = decode(list(range(len(lengths))), lengths)
    assert graphs.shape_for(step, is_decode=False) == expected


def test_decodes_take_the_smallest_shape_of_any_kind() -> None:
    graphs, _ = make_graphs([*PLAIN, *MIXED, decode_shape(4, 4)])
    assert graphs.shape_for(decode([0, 1]), is_decode=True) == decode_shape(2)
    assert graphs.shape_for(decode([0, 1], [7, 1]), is_decode=True) == MIXED[0]


def test_sequences_of_padding_have_no_tokens_when_none_are_left() -> None:
    graphs, seen = make_graphs(MIXED)
    graphs.run(MIXED[1], decode([0, 1, 2, 3, 4], [4, 1, 1, 1, 1]))
    computed = graphs.run(MIXED[1], decode([5, 2], [6, 1]))
    step = seen[-1]
    assert computed.logits is None
    assert computed.hidden[:, 0].tolist() == [20 + place for place in range(7)]
    assert step.max_query_len == 8
    assert step.query_starts.tolist() == [0, 6, 7, 8, 8, 8]
    assert step.context_lens.tolist() == [30, 31, 0, 0, 0]
    assert step.rows.tolist() == [5, 2, SPARE, SPARE, SPARE]
    assert step.slots.tolist() == [*range(40, 47), -1]
    assert step.token_rows.tolist() == [5] * 6 + [2, SPARE]


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
