"""What a step takes by its depth, the mean number of drafts of a sequence, for batches of one size."""

from __future__ import annotations

import itertools
import statistics

MEASURED_STEPS = 4
"""Steps that tell a depth's cost, one after another; the first only makes up for what steps before have put off."""

FIRST_PLAIN_STEPS = 32
"""Steps without drafts that tell their cost the first time. All depths are compared with it, and these cost nothing."""

_PACE_WEIGHT = 0.05
_LEAST_COST_WEIGHT = 0.2

_LONG = 2.0
PAUSE = 3.0
"""Steps count as `_LONG` times the usual at most. One of `PAUSE` times the median is not a measurement of its depth."""


class StepCosts:
    """Times of steps over a pace that all depths share, and when another depth may be explored.

    Every step moves the pace, so that no depth looks fast because it was measured when the machine was. Both are means
    of times that are bounded alike: where some steps are long, a median beside a mean would favour drafts.

    Attributes:
        until_exploration: Steps to go, at least.
        price_s: Seconds that the last exploration has lost; None before the first.
        is_suspended: Drafts have lost more time than there was to lose; they wait for the next exploration.
    """

    def __init__(self, max_depth: int) -> None:
        self._pace_s = 0.0
        self._costs: list[float | None] = [None] * (max_depth + 1)
        self._samples: list[list[float]] = [[] for _ in self._costs]
        self._num_measured = [0] * len(self._costs)
        self.until_exploration = 0.0
        self.price_s: float | None = None
        self.is_suspended = False

    @property
    def is_known(self) -> bool:
        """Return whether the cost of a step without drafts is known."""
        return self._costs[0] is not None

    @property
    def plain_s(self) -> float:
        """What a step without drafts takes at present, which is known."""
        cost = self._costs[0]
        assert cost is not None, "it is known"
        return self._pace_s * cost

    @property
    def exploration_s(self) -> float:
        """What there must be to lose before the next exploration: as much as the last one lost, or all of its steps."""
        return MEASURED_STEPS * self.plain_s if self.price_s is None else max(self.plain_s, self.price_s)

    def seconds(self, depth: int) -> float:
        """Return what a step of a depth takes at present; that of no drafts is known."""
        return self._pace_s * self.all(is_exploration=True)[depth]

    def speed_s(self, speed: float) -> float:
        """Return the seconds of a token at a speed in tokens by units of cost."""
        return self._pace_s / speed

    def measure(self, depth: int, duration_s: float, *, is_exploration: bool) -> None:
        """Record a step; a depth's cost is learned from its first steps, and from those that explore it."""
        self.until_exploration -= 1
        self._pace_s = self._pace_s or duration_s
        ratio, cost, samples = duration_s / self._pace_s, self._costs[depth], self._samples[depth]
        if cost is not None and not is_exploration:
            self._pace_s *= 1.0 + _PACE_WEIGHT * (min(ratio / cost, _LONG) - 1.0)
            return
        samples.append(ratio)
        if len(samples) == (MEASURED_STEPS if depth or self.is_known else FIRST_PLAIN_STEPS):
            measured = steady_mean(samples)
            self._num_measured[depth] += 1
            weight = max(1 / self._num_measured[depth], _LEAST_COST_WEIGHT)
            self._costs[depth] = measured if cost is None else cost + weight * (measured - cost)
            samples.clear()

    def resume(self) -> None:
        """Say that steps of another size came in between: the pace is an old one for some steps."""
        if self.is_known:
            self.until_exploration = max(self.until_exploration, round(2 / _PACE_WEIGHT))

    def all(self, *, is_exploration: bool = False) -> list[float]:
        """Return costs by depth: measured ones, straight lines between them, and behind them the last slope.

        They reach twice the deepest measured depth. An exploration looks at least to depth 1, and is optimistic about
        depths beyond the measured ones: that they cost no more.
        """
        known = [(depth, cost) for depth, cost in enumerate(self._costs) if cost is not None]
        costs, slope = [known[0][1]], 0.0
        for (first, cost), (last, end) in itertools.pairwise(known):
            slope = (end - cost) / (last - first)
            costs += [cost + slope * (depth - first) for depth in range(first + 1, last + 1)]
        reach = min(max(2 * known[-1][0], is_exploration), len(self._costs) - 1)
        slope = 0.0 if is_exploration else max(0.0, slope)
        return costs + [costs[-1] + slope * more for more in range(1, reach + 2 - len(costs))]


def steady_mean(samples: list[float]) -> float:
    """Return the mean of the times of successive steps but the first, long ones bounded and pauses left out."""
    median = statistics.median(samples[1:])
    return statistics.mean([min(sample, _LONG * median) for sample in samples[1:] if sample < PAUSE * median])
