from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.execution.batch.graph_shapes import GraphShape, decode_shape, mixed_shape
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
