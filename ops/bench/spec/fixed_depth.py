"""The policy that benches and tests compare with: always the same number of drafts."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """Always the same depth."""

    depth: int

    @property
    def is_backing_off(self) -> bool:
        """Say so where it is none."""
        return self.depth == 0

    def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
        """Say so unless it is none."""
        return self.depth > 0 and num_sequences > 0

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """Return the depth, or the limit where that is less."""
        return [min(self.depth, limit) for limit in limits]

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn nothing."""

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        """Learn nothing."""
