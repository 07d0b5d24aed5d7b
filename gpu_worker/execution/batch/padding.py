"""Pads the layout of a step to the size of a captured one. Values only; no device."""

from __future__ import annotations

import numpy as np

from gpu_worker.core.draft import SEES_ALL
from gpu_worker.execution.batch.graph_shapes import GraphShape
from gpu_worker.execution.batch.layout import StepLayout


def padding_layout(size: int, spare_row: int, num_windows: int) -> StepLayout:
    """Return a step of padding alone: `size` sequences of one token, which write no KV and attend to nothing.

    Args:
        size: Sequences.
        spare_row: The row of the batch that all of them have.
        num_windows: Groups of layers that keep the last tokens.
    """
    zeros, spare = np.zeros(size, dtype=np.int64), np.full(size, spare_row, dtype=np.int64)
    starts, lengths = np.arange(size + 1, dtype=np.int32), np.zeros(size, dtype=np.int32)
    nowhere = np.full(size, -1, dtype=np.int64)
    windows = (nowhere,) * num_windows
    return StepLayout(zeros, spare, zeros, nowhere, spare, starts, lengths, max_query_len=1, window_slots=windows)


def padded_layout(layout: StepLayout, padding: StepLayout, shape: GraphShape) -> StepLayout:
    """Pad a step to the numbers of tokens and sequences of a shape.

    Each sequence of padding gets one token, as long as there are tokens; those after them get none. Where there are
    more tokens of padding than sequences, the last tokens belong to no sequence.

    Args:
        layout: Of the step, which fits.
        padding: What `padding_layout` returned, of as many sequences as the shape has tokens or more.
        shape: Of the result.
    """
    num_tokens, num_seqs = len(layout.token_ids), len(layout.rows)
    tokens, seqs = slice(num_tokens, shape.num_tokens), slice(num_seqs, shape.num_seqs)
    starts = padding.query_starts[1 : 1 + shape.num_seqs - num_seqs] + np.int32(num_tokens)
    starts = np.minimum(starts, np.int32(shape.num_tokens))
    tree_masks = num_kept = None
    if shape.has_masks:
        tree_masks = np.full(shape.num_tokens, SEES_ALL, dtype=np.int64)
        if layout.tree_masks is not None:
            tree_masks[:num_tokens] = layout.tree_masks
        num_kept = np.zeros(shape.num_seqs, dtype=np.int32)
        num_kept[:num_seqs] = np.diff(layout.query_starts) if layout.num_kept is None else layout.num_kept
    return StepLayout(
        np.concatenate((layout.token_ids, padding.token_ids[tokens])),
        np.concatenate((layout.token_rows, padding.token_rows[tokens])),
        np.concatenate((layout.positions, padding.positions[tokens])),
        np.concatenate((layout.slots, padding.slots[tokens])),
        np.concatenate((layout.rows, padding.rows[seqs])),
        np.concatenate((layout.query_starts, starts)),
        np.concatenate((layout.context_lens, padding.context_lens[seqs])),
        shape.query_len,
        tree_masks,
        num_kept=num_kept,
        window_slots=tuple(
            np.concatenate((slots, nowhere[tokens]))
            for slots, nowhere in zip(layout.window_slots, padding.window_slots, strict=True)
        ),
    )
