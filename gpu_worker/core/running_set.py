"""The sequences that hold blocks and a slot, kept apart by what they need from the next step.

A *decoding* sequence has exactly one token to compute and samples after it, so it costs one token of every step's
budget. All others are *catching up*: a prompt, a prompt recomputed after preemption, several tokens accepted at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

from gpu_worker.core.sequence import Sequence
from shared.messages import Lane

_order = attrgetter("order")


class RunningSet:
    """Running sequences by id. Only the scheduler changes it.

    Attributes:
        departed: Sequences that have left since the last plan took this list.
    """

    def __init__(self) -> None:
        self.decoding: dict[str, Sequence] = {}
        self.catching_up: dict[str, Sequence] = {}
        self.num_batch = 0
        self.departed: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.decoding) + len(self.catching_up)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.decoding.values(), self.catching_up.values())

    def add(self, sequence: Sequence) -> None:
        """Add an admitted sequence."""
        self.num_batch += sequence.lane == "batch"
        self._place(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that finished or is preempted."""
        self.num_batch -= sequence.lane == "batch"
        self._take(sequence)
        self.departed.append(sequence)

    def take_departed(self) -> list[Sequence]:
        """Return the sequences that have left since the last call."""
        departed, self.departed = self.departed, []
        return departed

    def reclassify(self, sequence: Sequence) -> None:
        """Move a sequence to the side where its uncomputed tokens put it."""
        self._take(sequence)
        self._place(sequence)

    def ordered_catching_up(self) -> list[Sequence]:
        """Return the sequences that are catching up, in the order in which they get the step's tokens."""
        return sorted(self.catching_up.values(), key=_order)

    def num_tokens_before(self, lane: Lane) -> int:
        """Return how many tokens of a step the running sequences want before a newcomer of this lane gets any."""
        before = [sequence for sequence in self if lane == "batch" or sequence.lane == "interactive"]
        return sum(sequence.num_uncomputed_tokens for sequence in before)

    def batch(self) -> list[Sequence]:
        """Return the sequences of the batch lane."""
        return [sequence for sequence in self if sequence.lane == "batch"] if self.num_batch else []

    def worst(self) -> Sequence:
        """Return the sequence to preempt first: batch lane, then lowest priority, then latest arrival."""
        return max(self, key=_order)

    def _take(self, sequence: Sequence) -> None:
        if self.decoding.pop(sequence.id, None) is None:
            del self.catching_up[sequence.id]

    def _place(self, sequence: Sequence) -> None:
        side = self.decoding if sequence.num_uncomputed_tokens == 1 and sequence.wants_token else self.catching_up
        side[sequence.id] = sequence
