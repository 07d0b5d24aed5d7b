"""From a step's plan to the arrays that describe it, in a few whole-array operations. Values only; no device."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import SEES_ALL, Draft
from gpu_worker.core.plan import UNKNOWN_TOKEN, StepPlan
from gpu_worker.execution.batch.state_layout import Int32s, Int64s, StateLayout

__all__ = ["Int32s", "Int64s", "StepLayout", "lay_out"]


class StepLayout(Struct, frozen=True, gc=False):
    """The scheduled tokens of all sequences, end to end.

    Attributes:
        token_ids: `[num_tokens]`, `UNKNOWN_TOKEN` where only the device has it, as the last one of its row.
        token_rows: `[num_tokens]`, the row of each token's sequence.
        positions: `[num_tokens]`, in the sequence; draft tokens that exclude each other share one.
        slots: `[num_tokens]`, `block * block_size + offset` where each token's KV goes.
        rows: `[num_seqs]`, the row of each sequence.
        query_starts: `[num_seqs + 1]`, first token of each sequence, then the number of tokens.
        context_lens: `[num_seqs]`, tokens of each sequence that have KV after the step.
        max_query_len: Most tokens of a sequence.
        tree_masks: `[num_tokens]`, as those of `AttentionContext`; None where all drafts are chains.
        max_context_len: Largest of `context_lens`.
        num_kept: `[num_seqs]`, tokens of each sequence that are no drafts; None where there are no drafts.
        window_slots: Like `slots`, in each group of layers that keeps the last tokens.
        states: Of the sequences, in a model with recurrent layers.
    """

    token_ids: Int64s
    token_rows: Int64s
    positions: Int64s
    slots: Int64s
    rows: Int64s
    query_starts: Int32s
    context_lens: Int32s
    max_query_len: int
    tree_masks: Int64s | None = None
    max_context_len: int = 0
    num_kept: Int32s | None = None
    window_slots: tuple[Int64s, ...] = ()
    states: StateLayout | None = None

    @property
    def last_tokens(self) -> Int64s:
        """Return where the last token of each sequence is."""
        if self.max_query_len == 1:
            return np.arange(len(self.rows), dtype=np.int64)
        return self.query_starts[1:].astype(np.int64) - 1


def lay_out(
    plan: StepPlan,
    sequences: Values[BatchSequence],
    tables: Int32s,
    block_size: int,
    drafts: Values[Draft] | None = None,
    window_tables: Values[Int32s] = (),
    *,
    knows_tokens: bool = True,
) -> StepLayout:
    """Lay the scheduled tokens of all sequences end to end.

    Args:
        plan: Schedules at least one sequence.
        sequences: These sequences.
        tables: Block tables; a row covers the sequence's scheduled tokens.
        block_size: Tokens of a block.
        drafts: Of each sequence, to compute behind the scheduled tokens.
        window_tables: Like `tables`, of each group of layers that keeps the last tokens.
        knows_tokens: No step is in flight that samples a token which this one computes.
    """
    rows = np.array(plan.rows, dtype=np.int64)
    starts = np.array(plan.starts, dtype=np.int64)
    if drafts is None and plan.num_tokens == len(plan.rows):
        if knows_tokens and len(plan.token_ids) == len(rows) and UNKNOWN_TOKEN not in plan.token_ids:
            # What became known last is what is computed.
            token_ids = plan.token_ids
        else:
            token_ids = _token_ids(plan, sequences, None)
        return _lay_out_decodes(plan, token_ids, rows, starts, tables, block_size, window_tables)
    lengths = np.array([1] * plan.num_decodes + plan.lengths, dtype=np.int64)
    num_kept = None
    if drafts is not None:
        num_kept = lengths.astype(np.int32)
        lengths += [len(draft) for draft in drafts]
    query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    ends = lengths.cumsum()
    query_starts[1:] = ends
    token_rows = np.repeat(rows, lengths)
    places = np.arange(len(token_rows)) + np.repeat(starts - ends + lengths, lengths)
    positions, tree_masks = _branch(places, query_starts, drafts)
    context_lens = starts + lengths
    return StepLayout(
        token_ids=np.array(_token_ids(plan, sequences, drafts), dtype=np.int64),
        token_rows=token_rows,
        positions=positions,
        slots=_slots(tables, token_rows, places, block_size),
        rows=rows,
        query_starts=query_starts,
        context_lens=context_lens.astype(np.int32),
        max_query_len=int(lengths.max()),
        tree_masks=tree_masks,
        max_context_len=int(context_lens.max()),
        num_kept=num_kept,
        window_slots=tuple(_slots(table, token_rows, places, block_size) for table in window_tables),
    )


def _token_ids(plan: StepPlan, sequences: Values[BatchSequence], drafts: Values[Draft] | None) -> list[int]:
    """Return the scheduled tokens of all sequences, each with its drafts behind them."""
    if plan.num_tokens == len(plan.rows) and drafts is None:
        known = [sequence.token_ids for sequence in sequences]
        pairs = zip(known, plan.starts, strict=True)
        return [tokens[start] if start < len(tokens) else UNKNOWN_TOKEN for tokens, start in pairs]
    token_ids: list[int] = []
    lengths = [1] * plan.num_decodes + plan.lengths
    for place, (sequence, start, length) in enumerate(zip(sequences, plan.starts, lengths, strict=True)):
        token_ids += sequence.token_ids[start : start + length]
        if start >= len(sequence.token_ids):
            token_ids.append(UNKNOWN_TOKEN)
        if drafts is not None:
            token_ids += drafts[place].token_ids
    return token_ids


def _lay_out_decodes(
    plan: StepPlan,
    token_ids: list[int],
    rows: Int64s,
    positions: Int64s,
    tables: Int32s,
    block_size: int,
    window_tables: Values[Int32s],
) -> StepLayout:
    """Do the same for one token a sequence, which is the usual step, in fewer operations."""
    return StepLayout(
        token_ids=np.array(token_ids, dtype=np.int64),
        token_rows=rows,
        positions=positions,
        slots=_slots(tables, rows, positions, block_size),
        rows=rows,
        query_starts=np.arange(len(rows) + 1, dtype=np.int32),
        context_lens=(positions + 1).astype(np.int32),
        max_query_len=1,
        max_context_len=max(plan.starts) + 1,
        window_slots=tuple([_slots(table, rows, positions, block_size) for table in window_tables]),
    )


def _slots(tables: Int32s, token_rows: Int64s, places: Int64s, block_size: int) -> Int64s:
    """Return where the tokens at these places of their sequences go, in the blocks of one group of layers."""
    blocks = places // block_size
    # A block's number times its size, and the offset in it, which is `places - blocks * block_size`.
    return (tables[token_rows, blocks] - blocks) * block_size + places


def _branch(places: Int64s, query_starts: Int32s, drafts: Values[Draft] | None) -> tuple[Int64s, Int64s | None]:
    """Return the positions and masks of tokens that lie at `places` of their sequences."""
    if drafts is None or all(draft.parents is None for draft in drafts):
        return places, None
    positions, masks = places.copy(), np.full(len(places), SEES_ALL, dtype=np.int64)
    for draft, end in zip(drafts, query_starts[1:], strict=True):
        if draft.parents is not None:
            last = end - len(draft) - 1
            positions[last + 1 : end] = places[last] + np.array(draft.depths(), dtype=np.int64)
            masks[last:end] = draft.masks()
    return positions, masks
