"""Positions behind and within images whose tokens have several axes."""

from __future__ import annotations

import numpy as np

from gpu_worker.core.media import MediaSpan
from gpu_worker.execution.batch.placed_tokens import axis_positions, text_positions

# Four tokens that count as two positions each, the second image directly behind the first.
SPANS = [MediaSpan(2, 4, b"a" * 32, 4, (2, 2)), MediaSpan(6, 4, b"b" * 32, 4, (2, 2))]
POSITIONS = [0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 7]


def test_positions_are_the_same_wherever_a_step_begins_and_ends() -> None:
    for start in range(len(POSITIONS)):
        for end in range(start + 1, len(POSITIONS) + 1):
            places = np.arange(start, end, dtype=np.int64)
            assert text_positions(SPANS, places).tolist() == POSITIONS[start:end]


def test_image_counts_its_rows_and_columns_on_the_other_axes() -> None:
    assert axis_positions(SPANS, 5, 6).tolist() == [[2, 4, 4, 4, 4, 6], [3, 4, 4, 5, 5, 6], [3, 4, 5, 4, 5, 6]]
