"""The sequences that hold blocks and a slot, kept apart by their phase: what they need from the next step.

- *Decoding*: one token is to be computed, and the next is sampled behind it. It costs one token of a step's budget.
- *Catching up*: several tokens are to be computed, of a new prompt, of a preempted sequence, or of accepted drafts.
- *Finishing*: nothing is to be computed. A step in flight computes the last token, and ends the sequence.

A batch sequence that the planner leaves out of steps for a while is paused: it keeps its blocks, slot and phase.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from operator import attrgetter

from gpu_worker.core.sequence import Sequence
from shared.messages import Lane

_order = attrgetter("order")


class RunningSet:
    """Running sequences by phase and id, those that decode or catch up by lane too. Only the scheduler changes it.

    Attributes:
        due: By lane and id, the decoding sequences that need a block before their next step, or may: they have just
            begun to decode, or have filled a block. The planner looks at no others.
        num_needing_last_token: Sequences whose sampling or constraint needs the last token on the host
            (`Sequence.needs_last_token`).
        departed: Sequences that the runner must forget with the next plan: they have left, or a step was rolled back.
    """

    def __init__(self) -> None:
        self.decoding: dict[Lane, dict[str, Sequence]] = {"interactive": {}, "batch": {}}
        self.catching_up: dict[Lane, dict[str, Sequence]] = {"interactive": {}, "batch": {}}
        self.finishing: dict[str, Sequence] = {}
        self._phases = (*self.decoding.values(), *self.catching_up.values(), self.finishing)
        self.due: dict[Lane, dict[str, Sequence]] = {"interactive": {}, "batch": {}}
        self.num_batch = 0
        self.num_needing_last_token = 0
        self.departed: list[Sequence] = []

    def __len__(self) -> int:
        return sum(map(len, self._phases))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(phase.values() for phase in self._phases)

    @property
    def num_tokens_behind(self) -> int:
        """Tokens that are still to be computed of the sequences that are catching up."""
        return sum(s.num_uncomputed_tokens for lane in self.catching_up.values() for s in lane.values())

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
        """Put a sequence whose counters have changed into its phase, and let the planner look at it.

        In the same phase as before it keeps its place among the others.
        """
        if sequence.id not in self._phase_of(sequence):
            self._take(sequence)
        self._place(sequence)

    def reach_boundaries(self, sequences: Iterable[Sequence], block_size: int) -> None:
        """Let the planner look at decodes again that it has planned up to `Sequence.next_boundary`.

        That is where they fill a block of `block_size` tokens, or reach their last token, which ends the phase. A
        sequence that has just begun to decode has no boundary yet.
        """
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
        """Return which of a lane's decodes in a step are due, and take them off `due`."""
        due = self.due[lane]
        if not due or len(decodes) == len(self.decoding[lane]):
            taken = list(due.values())
            due.clear()
            return taken
        return [due.pop(sequence.id) for sequence in decodes if sequence.id in due]

    def put_back(self, lane: Lane, sequences: Iterable[Sequence]) -> None:
        """Undo `take_due`: the step was not planned."""
        self.due[lane].update((sequence.id, sequence) for sequence in sequences)

    def take_departed(self) -> list[Sequence]:
        """Return the sequences that have left since the last call, each once."""
        departed, self.departed = self.departed, []
        return list(dict.fromkeys(departed)) if departed else departed

    def decodes(self, lane: Lane, *, is_behind: bool, num_groups: int = 1) -> Collection[Sequence]:
        """Return the sequences of a lane that decode in a step.

        A step `is_behind` one in flight leaves out sequences whose last token that one samples, and that need it on the
        host.
        """
        decodes = self.decoding[lane].values()
        if num_groups > 1:
            group_size = -(-len(decodes) // num_groups)
            return list(islice((sequence for sequence in decodes if not sequence.num_pending_tokens), group_size))
        if not is_behind or not self.num_needing_last_token:
            return decodes
        return [sequence for sequence in decodes if not (sequence.needs_last_token and sequence.num_pending_tokens)]

    def ordered_catching_up(self, lane: Lane) -> list[Sequence]:
        """Return the sequences of a lane that are catching up, in the order in which they get the step's tokens."""
        return sorted(self.catching_up[lane].values(), key=_order)

    def batch(self) -> list[Sequence]:
        """Return the sequences of the batch lane."""
        return [sequence for sequence in self if sequence.lane == "batch"] if self.num_batch else []

    def check_integrity(self) -> None:
        """Assert that every sequence is in the phase that its counters say."""
        for sequence in self:
            assert self._phase_of(sequence).get(sequence.id) is sequence, f"{sequence.id} is in the wrong phase"
        for lane, due in self.due.items():
            assert due.keys() <= self.decoding[lane].keys()
        assert self.num_batch == sum(sequence.lane == "batch" for sequence in self)
        assert self.num_needing_last_token == sum(sequence.needs_last_token for sequence in self)

    def _place(self, sequence: Sequence) -> None:
        phase = self._phase_of(sequence)
        phase[sequence.id] = sequence
        sequence.next_boundary = sequence.next_publish = 0
        if phase is self.decoding[sequence.lane]:
            self.due[sequence.lane][sequence.id] = sequence

    def _take(self, sequence: Sequence) -> None:
        self.due[sequence.lane].pop(sequence.id, None)
        for phase in self._phases:
            if phase.pop(sequence.id, None) is not None:
                return
        raise AssertionError(f"{sequence.id} does not run")

    def _phase_of(self, sequence: Sequence) -> dict[str, Sequence]:
        num_uncomputed, wants_token = sequence.num_uncomputed_tokens, sequence.wants_token
        if num_uncomputed == 0 or (sequence.num_pending_tokens and not wants_token):
            return self.finishing
        return (self.decoding if num_uncomputed == 1 and wants_token else self.catching_up)[sequence.lane]
