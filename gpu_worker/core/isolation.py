"""Finds out which sequences of a failed step are at fault, by computing it again in ever smaller groups.

A group that fails is halved until it succeeds or holds one sequence. One that fails when it is computed again alone is
at fault: provided that the device can compute anything at all, which a control step proves where no group has succeeded
yet.
"""

from __future__ import annotations

from collections import deque

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence

Group = list[ScheduledSequence]


class Isolation:
    """The groups of one failed step that are still to be computed.

    Attributes:
        is_active: Such a step was not computed completely yet; nothing else may be computed meanwhile.
        is_runner_proven: A group or a control step succeeded since it failed.
    """

    def __init__(self) -> None:
        """Wait for a step to fail."""
        self.is_active = False
        self.is_runner_proven = False
        self._groups: deque[Group] = deque()

    def split(self, group: Group) -> Sequence | None:
        """Take in that a step of these shares failed; return the sequence that has failed alone, if it is one.

        A failure that passes is nobody's fault, so a sequence that had the whole step for itself gets another one.
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
