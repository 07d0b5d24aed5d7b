"""Where the tokens of a plan are: in their sequences, on the axis of positions, and in the blocks of the cache."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import Draft
from gpu_worker.core.media import MediaSpan
from gpu_worker.core.plan import UNKNOWN_TOKEN, StepPlan
from gpu_worker.execution.batch.transfers import Int32s, Int64s
from kernels.layer_cache import EVERY_TOKEN, CachedTokens


def text_positions(spans: Values[MediaSpan], places: Int64s) -> Int64s:
    """Return the positions, on the first axis, of tokens at these places of a sequence.

    Shapes:
        places, result: `[num_tokens]`, in ascending order
    """
    shift, positions = 0, places.copy()
    for span in spans:
        if span.start > places[-1]:
            break
        inside = (places >= span.start) & (places < span.end)
        positions[inside] = span.start + shift
        shift += span.num_positions - span.length
        behind = places >= span.end
        positions[behind] = places[behind] + shift
    return positions


def axis_positions(spans: Values[MediaSpan], start: int, count: int) -> Int64s:
    """Return the positions on all axes of `count` tokens of a sequence from place `start` on; `[3, count]`."""
    places = np.arange(start, start + count, dtype=np.int64)
    positions: Int64s = np.tile(text_positions(spans, places), (3, 1))
    for span in spans:
        inside = (places >= span.start) & (places < span.end)
        if inside.any():
            _, columns = span.token_grid
            offsets = places[inside] - span.start
            positions[1, inside] += offsets // columns
            positions[2, inside] += offsets % columns
    return positions


class Frame(Struct, frozen=True, gc=False):
    """Values that are the same for all steps of a runner.

    Attributes:
        tables: Block tables of the layers that keep all tokens.
        has_states: There are recurrent layers.
        has_axes: Positions have several axes, so that those behind an image are not places.
        kept: Which tokens are in the cache at all.
        windows: Tables of each group of layers that keeps the last tokens.
        knows_tokens: No step is in flight that samples a token which the next one computes.
    """

    tables: Int32s
    block_size: int
    has_states: bool = False
    has_axes: bool = False
    kept: CachedTokens = EVERY_TOKEN
    windows: tuple[Int32s, ...] = ()
    knows_tokens: bool = True


class Placed:
    """Where the tokens of a plan are, from which the sources of `FIELDS` work.

    Attributes:
        rows, starts: `[num_seqs]`, of the sequences: their rows, and where in the cache their first tokens go.
        lengths: `[num_seqs]`, their tokens, drafts included.
        query_starts: `[num_seqs + 1]`, of these.
        token_rows, places: `[num_tokens]`, the row of each token, and its place in the cache: in its sequence, without
            evicted tokens.
        saves: Copies of states to make, with the places of their sequences.
    """

    def __init__(
        self,
        plan: StepPlan,
        sequences: Values[BatchSequence],
        drafts: Values[Draft] | None,
        frame: Frame,
        evicted: Int64s | None = None,
    ) -> None:
        """Place the tokens of a plan; `evicted` tokens of each row are not in the cache, none of any if None."""
        self.plan = plan
        self.sequences = sequences
        self.drafts = drafts
        self.frame = frame
        self.rows: Int64s = np.array(plan.rows, dtype=np.int64)
        self.starts: Int64s = np.array(plan.starts, dtype=np.int64)
        if evicted is not None:
            self.starts -= evicted[self.rows]
        self.is_plain = drafts is None and plan.num_tokens == len(plan.rows)
        self.saves = [(place, work.saves) for place, work in plan.states if work.saves] if plan.states else []
        if self.is_plain:
            # One token a sequence, which is the usual step, in fewer operations.
            self.query_starts: Int32s = np.arange(len(self.rows) + 1, dtype=np.int32)
            self.token_rows, self.places, self.max_query_len = self.rows, self.starts, 1
            self.context_lens: Int32s = (self.starts + 1).astype(np.int32)
            self.max_context_len = int(self.starts.max()) + 1 if evicted is not None else max(plan.starts) + 1
            return
        lengths = np.array(self.num_kept, dtype=np.int64)
        if drafts is not None:
            lengths += [len(draft) for draft in drafts]
        ends = lengths.cumsum()
        self.query_starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        self.query_starts[1:] = ends
        self.token_rows = np.repeat(self.rows, lengths)
        self.places = np.arange(len(self.token_rows)) + np.repeat(self.starts - ends + lengths, lengths)
        self.context_lens = (self.starts + lengths).astype(np.int32)
        self.max_query_len, self.max_context_len = int(lengths.max()), int(self.context_lens.max())

    @property
    def num_kept(self) -> list[int]:
        """Return the tokens of each sequence that are not drafts."""
        return [1] * self.plan.num_decodes + self.plan.lengths

    def token_ids(self) -> list[int]:
        """Return the tokens of all sequences, each with its drafts behind them."""
        plan = self.plan
        are_new = self.is_plain and self.frame.knows_tokens and len(plan.token_ids) == len(self.rows)
        if are_new and UNKNOWN_TOKEN not in plan.token_ids:
            # The step computes the tokens that became known last.
            return plan.token_ids
        known = [sequence.token_ids for sequence in self.sequences]
        if self.is_plain:
            pairs = zip(known, plan.starts, strict=True)
            return [tokens[start] if start < len(tokens) else UNKNOWN_TOKEN for tokens, start in pairs]
        token_ids: list[int] = []
        for place, (tokens, start, length) in enumerate(zip(known, plan.starts, self.num_kept, strict=True)):
            token_ids += tokens[start : start + length]
            if start >= len(tokens):
                token_ids.append(UNKNOWN_TOKEN)
            if self.drafts is not None:
                token_ids += self.drafts[place].token_ids
        return token_ids

    def positions(self) -> Int64s:
        """Return positions; on the first axis, where there are several."""
        positions = self.places
        if not self.frame.has_axes:
            return positions
        seeing = [place for place, sequence in enumerate(self.sequences) if sequence.media]
        if not seeing:
            return positions
        positions = positions.copy()
        for place in seeing:
            part = slice(self.query_starts[place], self.query_starts[place + 1])
            places = self.places[part]
            positions[part] = text_positions(self.sequences[place].media, places)
        return positions

    def slots(self, tables: Int32s | None = None) -> Int64s:
        """Return where tokens go by the tables of one group of layers, those that keep all; -1 if not in the cache."""
        block_size, kept = self.frame.block_size, self.frame.kept
        tables = self.frame.tables if tables is None else tables
        blocks = self.places // block_size
        # A block's number times its size, and the offset in it, which is `places - blocks * block_size`.
        slots: Int64s = (tables[self.token_rows, blocks] - blocks) * block_size + self.places
        if kept.step > 1:
            return np.where(slots % kept.step == kept.first, slots // kept.step, -1)
        return slots

    def state_slots(self) -> list[int] | None:
        """Return where states are; a sequence that has no slot of its own has that of its row's number."""
        if not self.frame.has_states:
            return None
        return [item.row if item.state_slot is None else item.state_slot for item in self.sequences]

    def save_starts(self) -> Int32s:
        """Return the first copy of each sequence, then how many there are."""
        counts = np.zeros(len(self.rows) + 1, dtype=np.int32)
        for place, saves in self.saves:
            counts[place + 1] = len(saves)
        return counts.cumsum(dtype=np.int32)
