"""Chooses how many drafts a step verifies, from what drafts brought and what steps took.

Keeps, for each size of batch, the time of a step by the mean number of drafts a sequence; in each sequence the share of
its drafts that were right lately; and for all how much likelier the second guess of a draft is, or the third, than that
share foretells, since the guesses of a tree follow several ways, and a head may be worse than the one before. A step is
worth the tokens that it is expected to make over the time that it is expected to take; where no number of drafts beats
none, there are none. All this knowledge ages, so now and then a step tries what does not look best, as rarely as it is
expensive.
"""

from __future__ import annotations

import itertools
from operator import mul

from gpu_worker.core.sequence import Sequence

_FIRST_ACCEPTANCE = 0.6
_SEQUENCE_WEIGHT = 0.1
_ENGINE_WEIGHT = 0.02
_SHARED = 0.3
"""How much the engine's share of right drafts counts in a sequence's chances; its own is from few drafts."""

_PLACE_WEIGHT = 0.005
"""Slow, since the sequences that get the most guesses are those that were lucky lately."""

_BEST_CHANCE = 0.98

_TIME_WEIGHT = 0.1
_LONGEST_TRUSTED = 1.5
"""A step this many times longer than usual is taken for a disturbance, and counts as no longer than that."""

_LEAST_MEASUREMENTS = 3

_GUESSED_SLOPE = 0.05
"""What a draft is taken to add to a step, as a share of it, until that has been measured."""

_LEAST_GAIN = 1.03
"""How much faster drafts must be expected to be, so that what remains of noise does not make them slower."""

_TRIAL_COST = 0.01
"""Share of all time that trials may lose."""

_LEAST_TRIAL_INTERVAL = 32


class StepTimes:
    """Seconds of a step by mean number of drafts a sequence, for batches of one size."""

    def __init__(self, max_depth: int) -> None:
        """Know nothing."""
        self._measured: list[float | None] = [None] * (max_depth + 1)
        self._first: list[list[float]] = [[] for _ in range(max_depth + 1)]
        self.until_trial = _LEAST_TRIAL_INTERVAL
        self.num_trials = 0

    @property
    def is_known(self) -> bool:
        """Say whether a step without drafts has been measured."""
        return self._measured[0] is not None

    def measure(self, depth: int, duration_s: float) -> None:
        """Add a step. A depth counts as measured after some; the first may have set up what later ones find."""
        known = self._measured[depth]
        if known is not None:
            self._measured[depth] = known + _TIME_WEIGHT * (min(duration_s, known * _LONGEST_TRUSTED) - known)
            return
        first = self._first[depth]
        first.append(duration_s)
        if len(first) == _LEAST_MEASUREMENTS:
            self._measured[depth] = min(first)

    def all(self) -> list[float]:
        """Return the times of all depths: measured ones, straight lines between them, behind them the last slope."""
        times: list[float] = []
        last, before = 0, 0
        for depth, time in enumerate(self._measured):
            if time is None:
                continue
            for between in range(len(times), depth):
                times.append(times[last] + (time - times[last]) * (between - last) / (depth - last))
            times.append(time)
            before, last = last, depth
        slope = (times[last] - times[before]) / (last - before) if last else times[0] * _GUESSED_SLOPE
        return times + [times[last] + max(0.0, slope) * extra for extra in range(1, len(self._measured) - last)]


class PlaceFactors:
    """By the number of a guess in its draft: how often it became a token, over what was foretold."""

    def __init__(self, max_depth: int) -> None:
        """Believe what is foretold."""
        self._foretold = [0.5] * max_depth
        self._right = [0.5] * max_depth

    def learn(self, chances: list[float], accepted: tuple[int, ...]) -> None:
        """Take in a draft of guesses with these chances."""
        for guess, chance in enumerate(chances):
            self._foretold[guess] += _PLACE_WEIGHT * (chance - self._foretold[guess])
            self._right[guess] += _PLACE_WEIGHT * ((guess in accepted) - self._right[guess])

    def all(self) -> list[float]:
        """Return the factors."""
        return [right / foretold for right, foretold in zip(self._right, self._foretold, strict=True)]


class AdaptiveDepth:
    """A policy of speculation. One for an engine; also writes `Sequence.acceptance`."""

    def __init__(self, max_depth: int) -> None:
        """Never draft more than `max_depth` tokens for a sequence."""
        assert max_depth > 0
        self._max_depth = max_depth
        self._acceptance = _FIRST_ACCEPTANCE
        self._factors = PlaceFactors(max_depth)
        self._times: dict[int, StepTimes] = {}

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """Return the depths that make the most tokens a second, or for a trial, others."""
        times = self._times_of(len(sequences))
        if not times.is_known:
            return [0] * len(sequences)
        chances = self._chances(sequences, limits)
        expected = times.all()
        number = _best_number(len(sequences), [chance for chance, _ in chances], expected)
        times.until_trial -= 1
        if times.until_trial < 0:
            number = self._trial(times, number, len(sequences), expected)
        depths = [0] * len(sequences)
        for _, place in chances[:number]:
            depths[place] += 1
        return depths

    def learn(self, sequence: Sequence, num_drafted: int, accepted: tuple[int, ...]) -> None:
        """Move the sequence's share of right drafts, and the engine's, which new sequences begin with."""
        foretold = itertools.accumulate([self._acceptance_of(sequence)] * min(num_drafted, self._max_depth), mul)
        self._factors.learn(list(foretold), accepted)
        acceptance = self._acceptance if sequence.acceptance is None else sequence.acceptance
        # Those behind the first wrong one were not put to the test.
        for is_right in [True] * len(accepted) + [False] * (len(accepted) < num_drafted):
            acceptance += _SEQUENCE_WEIGHT * (is_right - acceptance)
            self._acceptance += _ENGINE_WEIGHT * (is_right - self._acceptance)
        sequence.acceptance = acceptance

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        """Move the time of steps like this one."""
        depth = min(self._max_depth, _mean_depth(num_drafted, num_sequences))
        self._times_of(num_sequences).measure(depth, duration_s)

    def _times_of(self, num_sequences: int) -> StepTimes:
        size = num_sequences.bit_length()
        if size not in self._times:
            self._times[size] = StepTimes(self._max_depth)
        return self._times[size]

    def _chances(self, sequences: list[Sequence], limits: list[int]) -> list[tuple[float, int]]:
        """Return for every draft there could be how likely it is to become a token, and its place, likely ones first.

        The drafts of a sequence come in their order, since each is less likely than the one before.
        """
        chances = []
        factors = self._factors.all()
        for place, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            acceptance, foretold, chance = self._acceptance_of(sequence), 1.0, _BEST_CHANCE
            for factor in factors[: max(0, limit)]:
                foretold *= acceptance
                chance = min(chance, foretold * factor)
                chances.append((chance, place))
        chances.sort(reverse=True)
        return chances

    def _acceptance_of(self, sequence: Sequence) -> float:
        own = self._acceptance if sequence.acceptance is None else sequence.acceptance
        return own + _SHARED * (self._acceptance - own)

    def _trial(self, times: StepTimes, best: int, num_sequences: int, expected: list[float]) -> int:
        """Return another number of drafts to try now, and put the next trial as far off as this one is expensive."""
        times.num_trials += 1
        # Where drafts pay, what they are compared with; else each depth in turn.
        depth = 0 if best else 1 + (times.num_trials - 1) % self._max_depth
        usual = expected[_mean_depth(best, num_sequences)]
        excess = abs(expected[depth] / usual - 1.0)
        times.until_trial = max(_LEAST_TRIAL_INTERVAL, round(excess / _TRIAL_COST))
        return depth * num_sequences


def _best_number(num_sequences: int, chances: list[float], times: list[float]) -> int:
    """Return how many of the likeliest drafts make the most tokens a second; `times` is by drafts a sequence."""
    best, fastest = 0, num_sequences / times[0] * _LEAST_GAIN
    step = max(1, num_sequences // 8)
    num_tokens = float(num_sequences)
    for number in range(step, len(chances) + 1, step):
        num_tokens += sum(chances[number - step : number])
        speed = num_tokens / times[_mean_depth(number, num_sequences)]
        if speed > fastest:
            best, fastest = number, speed
    return best


def _mean_depth(num_drafted: int, num_sequences: int) -> int:
    """Return the drafts a sequence, rounded up: the first draft of a step may cost more than any other."""
    return -(-num_drafted // num_sequences)
