"""Finds the sequences that make a step fail, by computing the step again in ever smaller groups.

A group that fails is halved until it succeeds or holds one sequence. A sequence that fails again when it is computed
alone is at fault, provided that the runner still works: where no group has succeeded yet, a control step has to.
"""

from __future__ import annotations

from collections import deque

from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.plan import StateWork
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from shared.sampling import Sampling

Group = list[ScheduledSequence]


class Isolation:
    """The groups of one failed step that are still to be computed.

    Attributes:
        is_runner_proven: A group or a control step has succeeded since the step failed.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.is_runner_proven = False
        self._groups: deque[Group] = deque()

    def split(self, group: Group) -> Sequence | None:
        """Halve the shares of a step that failed; return the sequence at fault where it was alone in a repeated step.

        A failure may be transient, so a sequence that was alone in the first step is computed once more.
        """
        is_first = not self.is_active
        if is_first:
            self.is_active, self.is_runner_proven = True, False
        if len(group) == 1 and not is_first:
            return group[0].sequence
        middle = len(group) // 2
        self._groups.extendleft(part for part in (group[middle:], group[:middle]) if part)
        return None

    def next_group(self) -> Group | None:
        """Take the next group to compute; None when none is left, which ends the isolation."""
        if self._groups:
            return self._groups.popleft()
        self.is_active = False
        return None

    def put_back(self, group: Group) -> None:
        """Let a group be the next one, after a step that only encodes its images."""
        self._groups.appendleft(group)


def restarted_shares(shares: list[ScheduledSequence], token_budget: int) -> list[ScheduledSequence]:
    """Return shares for sequences that restart before their shares of a failed step, because of a recurrent state.

    Each new share ends where the old one did, as far as all of them fit into one step. A sequence may also restart
    behind its old share, when another has meanwhile computed a longer prefix of it; it gets one token.
    """
    restarted = []
    for item in shares:
        start = item.sequence.num_computed_tokens
        num_tokens = max(1, min(item.start + item.num_tokens - start, token_budget // len(shares)))
        restarted.append(ScheduledSequence(item.sequence, start, num_tokens, item.samples))
    return restarted


def control_share(sequence: Sequence, block_size: int) -> ScheduledSequence:
    """Return a share that any working runner can compute: one token of a sequence made for this.

    It writes to the block and the state of `sequence` where that one's next token would go: no other sequence shares
    them, they cannot be found, and `sequence` itself is about to end.
    """
    place = (sequence.num_computed_tokens - sequence.num_evicted_tokens) // block_size
    # One that is to evict first has no room for it: it overwrites its last block.
    block = sequence.block_table[min(place, len(sequence.block_table) - 1)]
    control = Sequence("control", [0], 1, Sampling(temperature=0.0), 1, part=sequence.part, block_table=[block])
    control.window_tables = tuple(WindowTable([table.blocks[place]], 0, 1, 1) for table in sequence.window_tables)
    control.state_slot = sequence.state_slot
    work = None if control.state_slot is None else StateWork(is_first=True)
    return ScheduledSequence(control, 0, 1, True, state=work)
