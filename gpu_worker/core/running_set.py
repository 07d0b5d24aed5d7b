"""The sequences that hold blocks and a slot, kept apart by what they need from the next step.

A *decoding* sequence has exactly one token to compute and samples after it, so it costs one token of every step's
budget. Sequences are *catching up* with a prompt, a prompt recomputed after preemption, several tokens accepted at
once. A *landing* sequence needs nothing more: a step in flight computes the last that it may have, and ends it.
A batch sequence that no step names for a while is paused: it keeps its blocks, its slot and its side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter

from gpu_worker.core.sequence import Sequence
from shared.messages import Lane

_order = attrgetter("order")


class RunningSet:
    """Running sequences by id, decoding and catching up ones by lane too. Only the scheduler changes it.

    Attributes:
        due: Decoding sequences that the planner has to look at before their next step: they are new to their side, or
            have filled a block. Those of a lane by id.
        num_batch: Sequences of the batch lane.
        num_needing_last_token: Sequences that need their last token.
        departed: Sequences that have left since the last plan took this list, or of which the runner must know
            nothing any more.
    """

    def __init__(self) -> None:
        self.decoding: dict[Lane, dict[str, Sequence]] = {"interactive": {}, "batch": {}}
        self.catching_up: dict[Lane, dict[str, Sequence]] = {"interactive": {}, "batch": {}}
        self.landing: dict[str, Sequence] = {}
        self._sides = (*self.decoding.values(), *self.catching_up.values(), self.landing)
        self.due: dict[Lane, dict[str, Sequence]] = {"interactive": {}, "batch": {}}
        self.num_batch = 0
        self.num_needing_last_token = 0
        self.departed: list[Sequence] = []

    def __len__(self) -> int:
        return sum(map(len, self._sides))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(side.values() for side in self._sides)

    @property
    def num_tokens_behind(self) -> int:
        """Tokens that the sequences that are catching up have not computed."""
        return sum(s.num_uncomputed_tokens for side in self.catching_up.values() for s in side.values())

    def add(self, sequence: Sequence) -> None:
        """Add an admitted sequence."""
        self.num_batch += sequence.lane == "batch"
        self.num_needing_last_token += sequence.needs_last_token
        self._place(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that finished or is preempted."""
        self.num_batch -= sequence.lane == "batch"
        self.num_needing_last_token -= sequence.needs_last_token
        self._take(sequence)
        self.departed.append(sequence)

    def reclassify(self, sequence: Sequence) -> None:
        """Move a sequence, whose counters have changed, to the side where they put it, and forget what was due when.

        It keeps its place where the side is the same.
        """
        if sequence.id not in self._side(sequence):
            self._take(sequence)
        self._place(sequence)

    def reach_boundaries(self, sequences: Iterable[Sequence], block_size: int) -> None:
        """Take in that decodes were planned that fill blocks of so many tokens, or the first since classification."""
        due = self.due
        for sequence in sequences:
            num_computed, last = sequence.num_computed_tokens, sequence.max_num_tokens - 1
            if num_computed >= last:
                self.reclassify(sequence)
                continue
            due[sequence.lane][sequence.id] = sequence
            boundary = num_computed - num_computed % block_size + block_size
            sequence.next_boundary = boundary if boundary < last else last

    def take_due(self, lane: Lane, decodes: Collection[Sequence]) -> list[Sequence]:
        """Return those that are due of a lane's decodes in a step; from now on they are not."""
        due = self.due[lane]
        if not due or len(decodes) == len(self.decoding[lane]):
            taken = list(due.values())
            due.clear()
            return taken
        return [due.pop(sequence.id) for sequence in decodes if sequence.id in due]

    def put_back(self, lane: Lane, sequences: Iterable[Sequence]) -> None:
        """Let decodes that `take_due` has returned be due as before."""
        self.due[lane].update((sequence.id, sequence) for sequence in sequences)

    def take_departed(self) -> list[Sequence]:
        """Return the sequences that have left since the last call, each once."""
        departed, self.departed = self.departed, []
        return list(dict.fromkeys(departed)) if departed else departed

    def decodes(self, lane: Lane, *, is_behind: bool) -> Collection[Sequence]:
        """Return the sequences of a lane that decode in a step.

        Args:
            lane: Of the sequences.
            is_behind: The step is planned behind one in flight: those that need their last token, which that one
                samples, are left out.
        """
        decodes = self.decoding[lane].values()
        if not is_behind or not self.num_needing_last_token:
            return decodes
        return [sequence for sequence in decodes if not (sequence.needs_last_token and sequence.num_pending_tokens)]

    def ordered_catching_up(self, lane: Lane) -> list[Sequence]:
        """Return the sequences of a lane that are catching up, in the order in which they get the step's tokens."""
        return sorted(self.catching_up[lane].values(), key=_order)

    def batch(self) -> list[Sequence]:
        """Return the sequences of the batch lane."""
        return [sequence for sequence in self if sequence.lane == "batch"] if self.num_batch else []

    def worst(self) -> Sequence:
        """Return the sequence to preempt first: batch lane, then lowest priority, then latest arrival."""
        return max(self, key=_order)

    def check_integrity(self) -> None:
        """Assert that every sequence is where its counters put it."""
        for sequence in self:
            assert self._side(sequence).get(sequence.id) is sequence, f"{sequence.id} is on the wrong side"
        for lane, due in self.due.items():
            assert due.keys() <= self.decoding[lane].keys()
        assert self.num_batch == sum(sequence.lane == "batch" for sequence in self)
        assert self.num_needing_last_token == sum(sequence.needs_last_token for sequence in self)

    def _place(self, sequence: Sequence) -> None:
        """Put a sequence on its side."""
        side = self._side(sequence)
        side[sequence.id] = sequence
        sequence.next_boundary = sequence.next_publish = 0
        if side is self.decoding[sequence.lane]:
            self.due[sequence.lane][sequence.id] = sequence

    def _take(self, sequence: Sequence) -> None:
        self.due[sequence.lane].pop(sequence.id, None)
        for side in self._sides:
            if side.pop(sequence.id, None) is not None:
                return
        raise AssertionError(f"{sequence.id} does not run")

    def _side(self, sequence: Sequence) -> dict[str, Sequence]:
        num_uncomputed, wants_token = sequence.num_uncomputed_tokens, sequence.wants_token
        if num_uncomputed == 0 or (sequence.num_pending_tokens and not wants_token):
            return self.landing
        return (self.decoding if num_uncomputed == 1 and wants_token else self.catching_up)[sequence.lane]
