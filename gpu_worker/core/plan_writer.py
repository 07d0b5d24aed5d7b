"""Writes plans: gives sequences their rows, and sends only the changes since the previous plan.

Owns `Sequence.row`, and the counts of tokens and blocks already sent (`num_told_tokens`, `num_told_blocks`). Code that
shortens a sequence or replaces the end of its block table lowers these counts. `batch_sequences` is the other side.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field

from gpu_worker.core.evictions import Evictions
from gpu_worker.core.plan import UNKNOWN_TOKEN, EncodeWork, NewSequence, StateWork, StepPlan, Written
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence

TakeImages = Callable[[], tuple[list[bytes], list[EncodeWork]]]
"""Returns the images that the next plan lets the runner forget, and those that it encodes."""


@dataclass(eq=False)
class PlanWriter:
    """Owns the rows of a batch: as many as sequences were in it at once."""

    _take_images: TakeImages | None = None
    _evictions: Evictions | None = None
    _free: list[int] = field(default_factory=list)
    _num_rows: int = 0

    def write_any(
        self, scheduled: Values[ScheduledSequence], departed: Values[Sequence] = (), step: int = 0
    ) -> StepPlan:
        """Return the plan of a step whatever it consists of; what has drafts comes first."""
        is_decode = [item.num_tokens == 1 and item.samples for item in scheduled]
        num_decodes = [*is_decode, False].index(False)
        assert not any(item.num_draft_tokens for item in scheduled[num_decodes:]), "only decodes have drafts"
        num_tokens = sum(item.num_tokens for item in scheduled)
        return self.write(step, scheduled, num_tokens, departed, num_decodes, has_drafts=True)

    def write(
        self,
        step: int,
        scheduled: Values[ScheduledSequence],
        num_tokens: int,
        departed: Values[Sequence],
        num_decodes: int,
        *,
        has_drafts: bool,
    ) -> StepPlan:
        """Return the plan of these shares, decodes first, which alone may verify drafts.

        `departed` have left the batch since the plan before. One that was preempted may be scheduled again at once, as
        if it were new.
        """
        left = self._release(departed) if departed else []
        new: list[NewSequence] = []
        tokens: list[Written] = []
        blocks: list[Written] = []
        rows, starts, known = self._columns(scheduled, num_decodes, new, tokens, blocks)
        first = scheduled[0].sequence
        # Either all sequences of a model have windows, or a state, or none has.
        if first.window_tables:
            _add_window_blocks(scheduled, rows, blocks)
        states: list[tuple[int, StateWork]] = []
        if first.state_slot is not None:
            states = [(place, item.state) for place, item in enumerate(scheduled) if item.state is not None]
        num_drafts: list[int] = []
        forced: list[tuple[int, tuple[int, ...]]] = []
        if has_drafts:
            num_drafts = [item.num_draft_tokens for item in scheduled[:num_decodes]]
            num_drafts = num_drafts if any(num_drafts) else []
            forced = [(place, item.forced) for place, item in enumerate(scheduled[:num_decodes]) if item.forced]
        lengths: list[int] = []
        samples: list[bool] = []
        if num_decodes < len(rows):
            del known[num_decodes:]
            lengths = [item.num_tokens for item in scheduled[num_decodes:]]
            samples = [item.samples for item in scheduled[num_decodes:]]
        columns = (rows, starts, num_tokens, num_decodes, known, lengths, samples, num_drafts)
        images = ([], []) if self._take_images is None else self._take_images()
        evictions = self._evictions.take(step) if self._evictions is not None and self._evictions.untold else []
        return StepPlan(step, *columns, forced, states, left, new, tokens, blocks, *images, evictions)

    def write_encoding(self, step: int) -> StepPlan:
        """Return the plan of a step that does nothing but encode images."""
        assert self._take_images is not None, "only images are encoded"
        forgotten, encodes = self._take_images()
        return StepPlan(step, [], [], 0, forgotten=forgotten, encodes=encodes)

    def _columns(
        self,
        scheduled: Values[ScheduledSequence],
        num_decodes: int,
        new: list[NewSequence],
        tokens: list[Written],
        blocks: list[Written],
    ) -> tuple[list[int], list[int], list[int]]:
        """Return rows, starts and single new tokens, and add what else is to be told to `new`, `tokens` and `blocks`.

        The hot loop of planning: for a usual decode, no calls but those that add to lists.
        """
        rows: list[int] = []
        starts: list[int] = []
        known: list[int] = []
        for item in scheduled:
            sequence = item.sequence
            row, token_ids, told = sequence.row, sequence.token_ids, sequence.num_told_tokens
            token_id = UNKNOWN_TOKEN
            if row is None:
                row = self._enter(sequence, new)
            elif (num_new := len(token_ids) - told) == 1 and told and len(rows) < num_decodes:
                token_id = token_ids[told]
                sequence.num_told_tokens = told + 1
            elif num_new:
                tokens.append(Written(row, told, token_ids[told:]))
                sequence.num_told_tokens = told + num_new
            if len(sequence.block_table) != sequence.num_told_blocks:
                blocks.append(Written(row, sequence.num_told_blocks, sequence.block_table[sequence.num_told_blocks :]))
                sequence.num_told_blocks = len(sequence.block_table)
            known.append(token_id)
            rows.append(row)
            starts.append(item.start)
        return rows, starts, known

    @staticmethod
    def rewind(sequence: Sequence, num_tokens: int) -> None:
        """Resend a sequence's tokens after the first `num_tokens`, because earlier plans sent different ones."""
        # Two tokens more, or all: a single one would be taken for the next of those sent.
        sequence.num_told_tokens = min(sequence.num_told_tokens, max(0, num_tokens - 2))

    def _release(self, departed: Values[Sequence]) -> list[int]:
        rows = []
        for sequence in departed:
            if sequence.row is not None:
                rows.append(sequence.row)
                sequence.row = None
        self._free += rows
        return rows

    def _enter(self, sequence: Sequence, new: list[NewSequence]) -> int:
        if not self._free:
            self._free.append(self._num_rows)
            self._num_rows += 1
        sequence.row = row = self._free.pop()
        sequence.num_told_tokens = len(sequence.token_ids)
        sequence.num_told_blocks = 0
        for table in sequence.window_tables:
            table.num_told = 0
        new.append(
            NewSequence(
                row,
                sequence.id,
                list(sequence.token_ids),
                sequence.num_prompt_tokens,
                sequence.sampling,
                sequence.stop_ids,
                sequence.bad_words,
                sequence.prediction,
                sequence.pooling,
                len(sequence.window_tables),
                None if sequence.state_slot is None else sequence.state_slot.slot,
                sequence.media,
                sequence.adapter,
                sequence.num_evicted_tokens,
                None if sequence.budget is None else sequence.budget.scored_from,
                sequence.part,
            )
        )
        return row


def _add_window_blocks(scheduled: Values[ScheduledSequence], rows: list[int], blocks: list[Written]) -> None:
    for item, row in zip(scheduled, rows, strict=True):
        for group, table in enumerate(item.sequence.window_tables, start=1):
            if len(table.blocks) != table.num_told:
                blocks.append(Written(row, table.num_told, table.blocks[table.num_told :], group))
                table.num_told = len(table.blocks)
