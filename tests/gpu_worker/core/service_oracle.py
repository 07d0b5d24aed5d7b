"""What each client was served, counted from plans alone, and the bound of the paper on how far that may differ.

Source: Sheng et al. (arXiv 2401.00588), theorem 4.4: of two clients that have requests waiting throughout an interval,
neither is served more than the other by over 2 max(w_p L_input, w_q M) in it, where L_input is the longest prompt and M
the most tokens that running sequences have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import combinations

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledStep

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


def bound(max_input: int, max_running: int, least_weight: float = 1.0) -> float:
    return 2 * max(INPUT_WEIGHT * max_input, OUTPUT_WEIGHT * max_running) / least_weight


class ServiceOracle:
    """Fed with every plan and with who waits before and after it."""

    def __init__(self, client: Callable[[Sequence], str]) -> None:
        self._client = client
        self.served: dict[str, float] = defaultdict(float)
        self._reached: dict[Sequence, int] = {}
        self._num_input: dict[Sequence, int] = {}
        self._waiting: set[Sequence] = set()
        # By pair: how much more the first was served when both began to have something waiting.
        self._began: dict[tuple[str, str], float] = {}
        self.largest = 0.0

    def waits(self, sequences: Iterable[Sequence]) -> None:
        """Take note of who waits; a client of whom nothing is left that waited before may have waited for nothing."""
        waiting = set(sequences)
        for sequence in waiting:
            self._num_input.setdefault(sequence, len(sequence.token_ids))
        steady = {self._client(sequence) for sequence in waiting & self._waiting}
        self._waiting = waiting
        pairs = set(combinations(sorted({self._client(sequence) for sequence in waiting}), 2))
        for pair in list(self._began):
            if pair not in pairs or not steady.issuperset(pair):
                del self._began[pair]
        for pair in pairs:
            difference = self.served[pair[0]] - self.served[pair[1]]
            self.largest = max(self.largest, abs(difference - self._began.setdefault(pair, difference)))

    def serves(self, plan: ScheduledStep) -> None:
        """Count what a plan computes for the first time; what the prefix cache holds is not."""
        for item in plan.scheduled:
            sequence = item.sequence
            reached = self._reached.get(sequence, item.start)
            end = item.start + item.num_tokens
            known = self._num_input.get(sequence, sequence.num_prompt_tokens)
            cost = sum(INPUT_WEIGHT if index < known else OUTPUT_WEIGHT for index in range(reached, end))
            self._reached[sequence] = max(reached, end)
            self.served[self._client(sequence)] += cost / sequence.weight
