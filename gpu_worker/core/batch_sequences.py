"""The sequences of the batch as the process that computes plans knows them: from the plans alone.

Owns a `BatchSequence` for each row. Plans are applied in the order of their steps, each before its step is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from gpu_worker.core.constraint import ConstraintSource, OutputConstraint
from gpu_worker.core.media import MediaSpan
from gpu_worker.core.plan import NewSequence, StateWork, StepPlan, Written
from gpu_worker.core.pooling import PoolingPlan
from shared.sampling import Sampling


@dataclass(slots=True, eq=False)
class BatchSequence:
    """A sequence from its entry into the batch to its departure. `NewSequence` has most attributes.

    Attributes:
        block_table: Ids of its blocks, in order, of the layers that keep all tokens. Only grows: where its end is
            replaced, the list is a new one.
    """

    row: int
    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prediction: tuple[int, ...] = ()
    pooling: PoolingPlan | None = None
    state_slot: int | None = None
    media: tuple[MediaSpan, ...] = ()
    constraint: OutputConstraint | None = None
    block_table: list[int] = field(default_factory=list)
    window_tables: list[list[int]] = field(default_factory=list)
    has_failed: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Known tokens that were generated."""
        return len(self.token_ids) - self.num_prompt_tokens


class Share(Struct, frozen=True, gc=False):
    """One sequence's share of a step. The tokens `start : start + num_tokens` are computed.

    The last of these may be one that a step in flight is sampling, and not in `sequence.token_ids` yet.

    Attributes:
        num_draft_tokens: Draft tokens behind these that may be computed and verified.
        forced: Draft tokens that the sequence's constraint forces; these are verified instead of others.
    """

    sequence: BatchSequence
    start: int
    num_tokens: int
    samples: bool
    num_draft_tokens: int = 0
    forced: tuple[int, ...] = ()
    state: StateWork | None = None


class Changes(Struct, frozen=True, gc=False):
    """Who left the batch with a plan, and who entered it."""

    departed: list[BatchSequence]
    new: list[BatchSequence]


NO_CHANGES = Changes([], [])


class BatchSequences:
    """Applies plans."""

    def __init__(self, constraints: ConstraintSource | None = None) -> None:
        self._constraints = constraints
        self._by_row: dict[int, BatchSequence] = {}
        # By row, how many tokens of a sequence its constraint has followed.
        self._constrained: dict[int, int] = {}

    def __iter__(self) -> Iterator[BatchSequence]:
        return iter(self._by_row.values())

    def apply(self, plan: StepPlan) -> Changes:
        """Bring all sequences up to date."""
        changes = self._change(plan) if plan.new or plan.departed else NO_CHANGES
        by_row = self._by_row
        for written in plan.tokens:
            by_row[written.row].token_ids[written.first :] = written.ids
        for row, token_id in zip(plan.rows, plan.token_ids, strict=False):
            if token_id >= 0:
                by_row[row].token_ids.append(token_id)
        for written in plan.blocks:
            self._write_blocks(by_row[written.row], written)
        if self._constraints is not None and self._constrained:
            self._follow(self._constraints)
        return changes

    def _change(self, plan: StepPlan) -> Changes:
        departed = [self._by_row.pop(row) for row in plan.departed if row in self._by_row]
        for row in plan.departed:
            self._constrained.pop(row, None)
        # After an engine that ended before its runner did, no plan says that its sequences have left.
        departed += [self._by_row.pop(item.row) for item in plan.new if item.row in self._by_row]
        return Changes(departed, [self._enter(item) for item in plan.new])

    def of(self, rows: Iterable[int]) -> list[BatchSequence]:
        """Return the sequences of these rows."""
        return list(map(self._by_row.__getitem__, rows))

    def shares(self, plan: StepPlan) -> list[Share]:
        """Return the shares of a plan that was applied."""
        sequences, num_decodes = self.of(plan.rows), plan.num_decodes
        if not (plan.num_drafts or plan.forced or plan.states or plan.lengths):
            return [Share(sequence, start, 1, True) for sequence, start in zip(sequences, plan.starts, strict=True)]
        num_drafts = plan.num_drafts or [0] * num_decodes
        forced, states = dict(plan.forced), dict(plan.states)
        shares = [
            Share(sequence, start, 1, True, count, forced.get(place, ()), states.get(place))
            for place, (sequence, start, count) in enumerate(zip(sequences, plan.starts, num_drafts, strict=False))
        ]
        others = zip(sequences[num_decodes:], plan.starts[num_decodes:], plan.lengths, plan.samples, strict=True)
        shares += [
            Share(sequence, start, length, samples, state=states.get(place))
            for place, (sequence, start, length, samples) in enumerate(others, start=num_decodes)
        ]
        return shares

    def clear(self) -> list[BatchSequence]:
        """Forget all sequences, and return them: no plan will name them any more."""
        departed = list(self)
        self._by_row.clear()
        self._constrained.clear()
        return departed

    def _enter(self, item: NewSequence) -> BatchSequence:
        self._by_row[item.row] = sequence = BatchSequence(
            item.row,
            item.id,
            list(item.token_ids),
            item.num_prompt_tokens,
            item.sampling,
            item.stop_ids,
            item.bad_words,
            item.prediction,
            item.pooling,
            item.state_slot,
            item.media,
            window_tables=[[] for _ in range(item.num_windows)],
        )
        self._constrained.pop(item.row, None)
        if item.sampling.grammar is not None and self._constraints is not None:
            sequence.constraint = self._constraints.open(item)
            self._constrained[item.row] = len(item.token_ids)
        return sequence

    def _follow(self, constraints: ConstraintSource) -> None:
        for row, num_followed in self._constrained.items():
            sequence = self._by_row[row]
            if num_followed < len(sequence.token_ids):
                assert sequence.constraint is not None, "only sequences with one are listed"
                constraints.follow(sequence.constraint, sequence.token_ids[num_followed:])
                self._constrained[row] = len(sequence.token_ids)

    @staticmethod
    def _write_blocks(sequence: BatchSequence, written: Written) -> None:
        group = written.group
        table = sequence.block_table if group == 0 else sequence.window_tables[group - 1]
        if written.first == len(table):
            table += written.ids
            return
        table = [*table[: written.first], *written.ids]
        if group == 0:
            sequence.block_table = table
        else:
            sequence.window_tables[group - 1] = table
