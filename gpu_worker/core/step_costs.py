"""What a step takes by its depth, the mean number of drafts of a sequence, for batches of one size."""

from __future__ import annotations

import itertools
import statistics

MEASURED_STEPS = 4
"""Steps that tell a depth's cost, one after another; the first only makes up for what steps before have put off."""

_PACE_WEIGHT = 0.05

_EXPLORATION_SHARE = 0.01
"""Share of all time that exploration may lose."""


class StepCosts:
    """Times of steps over a pace that all depths share, and how long it is until another depth should be explored.

    Every step moves the pace, so that no depth looks fast because it was measured when the machine was.

    Attributes:
        until_exploration: Steps to go.
    """

    def __init__(self, max_depth: int) -> None:
        """Know nothing."""
        self._pace_s = 0.0
        self._costs: list[float | None] = [None] * (max_depth + 1)
        self._samples: list[list[float]] = [[] for _ in self._costs]
        self.until_exploration = 0.0

    @property
    def is_known(self) -> bool:
        """Say whether the cost of a step without drafts is known."""
        return self._costs[0] is not None

    def measure(self, depth: int, duration_s: float, *, is_exploration: bool) -> None:
        """Record a step; a depth's cost is learned from its first steps, and from those that explore it."""
        self.until_exploration -= 1
        self._pace_s = self._pace_s or duration_s
        ratio, cost, samples = duration_s / self._pace_s, self._costs[depth], self._samples[depth]
        if cost is not None and not is_exploration:
            self._pace_s *= 1.0 + _PACE_WEIGHT * (min(ratio / cost, 2.0) - 1.0)
            return
        samples.append(ratio)
        if len(samples) == MEASURED_STEPS:
            measured = statistics.median(samples[1:])
            self._costs[depth] = measured if cost is None else (cost + measured) / 2
            samples.clear()

    def num_steps(self, depth: int, duration_s: float) -> float:
        """Return how many steps of a depth take as long; that of no drafts is known."""
        return duration_s / self._pace_s / self.all(is_exploration=True)[depth]

    def charge(self, num_steps: float) -> None:
        """Put the next exploration off for as long as makes these steps, which this one has lost, its share of all.

        A step that was long because the host paused counts up to a limit.
        """
        self.until_exploration += min(max(0.0, num_steps), 1 / _EXPLORATION_SHARE) / _EXPLORATION_SHARE

    def resume(self) -> None:
        """Say that steps of another size came in between: the pace is an old one for some steps."""
        if self.is_known:
            self.until_exploration = max(self.until_exploration, round(2 / _PACE_WEIGHT))

    def all(self, *, is_exploration: bool = False) -> list[float]:
        """Return costs by depth: measured ones, straight lines between them, and behind them the last slope.

        They reach twice as deep as what was measured. An exploration looks at least to depth 1, and is optimistic about
        what was never measured: that it costs no more than what is less deep.
        """
        known = [(depth, cost) for depth, cost in enumerate(self._costs) if cost is not None]
        costs, slope = [known[0][1]], 0.0
        for (first, cost), (last, end) in itertools.pairwise(known):
            slope = (end - cost) / (last - first)
            costs += [cost + slope * (depth - first) for depth in range(first + 1, last + 1)]
        reach = min(max(2 * known[-1][0], is_exploration), len(self._costs) - 1)
        slope = 0.0 if is_exploration else max(0.0, slope)
        return costs + [costs[-1] + slope * more for more in range(1, reach + 2 - len(costs))]
