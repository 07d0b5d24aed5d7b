from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from gpu_worker.execution.decode_graphs import DecodeGraphs, bucket_sizes
from gpu_worker.execution.step_layout import StepLayout
from gpu_worker.execution.step_tensors import StepTensors

CPU = torch.device("cpu")


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 40, 64, 100, 256, 300, 512])
def test_buckets_grow_to_the_largest_batch_and_waste_little(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    for before, size in pairwise(sizes):
        assert size - before <= max(8, before // 4)


def decode(rows: list[int]) -> StepLayout:
    """One token a sequence; the numbers only have to be told apart."""
    count = len(rows)
    numbers = np.arange(count, dtype=np.int64)
    row_numbers = np.array(rows, dtype=np.int64)
    starts = np.arange(count + 1, dtype=np.int32)
    lengths = numbers.astype(np.int32) + 30
    return StepLayout(numbers + 10, row_numbers, numbers + 20, numbers + 40, row_numbers, starts, lengths, 1)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 11])
def test_batch_is_padded_with_sequences_that_have_no_tokens(count: int) -> None:
    seen: list[StepTensors] = []

    def body(step: StepTensors) -> torch.Tensor:
        seen.append(step)
        return step.token_ids[:, None].float()

    graphs = DecodeGraphs(body, 11, spare_row=11, device=CPU)
    graphs.capture()
    seen.clear()
    # A larger step first, whose leftovers must not be taken for a part of this one.
    graphs.run(decode(list(range(11))), np.full(11, 7, dtype=np.int64))
    rows = list(range(count))[::-1]
    logits, row_tensor = graphs.run(decode(rows), np.arange(count) + 50)
    step = seen[-1]
    size = next(size for size in (1, 2, 4, 8, 11) if size >= count)
    padding = size - count
    assert logits[:, 0].tolist() == [10 + place for place in range(count)]
    assert row_tensor.tolist() == rows
    assert step.token_rows.tolist() == step.rows.tolist() == rows + [11] * padding
    assert step.positions.tolist() == [20 + place for place in range(count)] + [0] * padding
    assert step.slots.tolist() == [40 + place for place in range(count)] + [-1] * padding
    assert step.context_lens.tolist() == [30 + place for place in range(count)] + [0] * padding
    assert step.output_positions.tolist()[:count] == [50 + place for place in range(count)]
    assert step.query_starts.tolist() == list(range(size + 1))
    assert step.query_starts.dtype == step.context_lens.dtype == torch.int32
