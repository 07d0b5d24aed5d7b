"""Chooses how many drafts a step verifies, from what drafts brought and what steps took.

Keeps, for each size of batch, how much longer drafts make a step, by their mean number a sequence; in each sequence the
share of its drafts that were right lately; and for all how much likelier the second guess of a draft is, or the third,
than that share foretells, since the guesses of a tree follow several ways, and a head may be worse than the one before.
A step is worth the tokens that it is expected to make over the time that it is expected to take; where no number of
drafts beats none, there are none. All this knowledge ages, so now and then some steps try what does not look best, as
rarely as they are expensive.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from operator import itemgetter, mul

from gpu_worker.core.sequence import Sequence

_FIRST_ACCEPTANCE = 0.6
_PREDICTED_ACCEPTANCE = 0.8
"""Of a sequence whose output is predicted: whatever others were like, and until it has shown what it is like."""

_SEQUENCE_WEIGHT = 0.05
_ENGINE_WEIGHT = 0.02
"""Of a draft in a small batch; in a large one a step brings as many, which count for less each."""

_SMALL_BATCH = 4
_SHARED = 0.3
"""How much the engine's share of right drafts counts in a sequence's chances; its own is from few drafts."""

_PLACE_WEIGHT = 0.005
"""Slow, since the sequences that get the most guesses are those that were lucky lately."""

_BEST_CHANCE = 0.98

_PACE_WEIGHT = 0.1
_STEPS_TO_PACE = 5
"""After steps of another size: what these took is the pace, which may have changed; ratios wait."""

_RATIO_WEIGHT = 0.02
"""Slow: what makes a machine slower for a while is no matter of drafts, and is the pace's to follow."""

_TRIAL_WEIGHT = 0.5
"""Of what a trial measured."""

_LONGEST_TRUSTED = 1.5
"""A step this many times longer than usual is taken for a disturbance, and counts as no longer than that."""

_LEAST_MEASUREMENTS = 3

_GUESSED_SLOPE = 0.05
"""What a draft is taken to add to a step, as a share of it, until that has been measured."""

_LEAST_GAIN = 1.03
"""How much faster drafts must be expected to be, so that what remains of noise does not make them slower."""

_TRIAL_COST = 0.003
"""Share of all time that trials may lose, in the long run."""

_EARLY_TRIALS = 8
"""The first one may lose so many times as much, the n-th one an n-th of that: little is known then."""

_WORST_LOSS = 10.0
"""A trial's step of more usual ones than this is taken for a disturbance, and counts as so many."""

_LEAST_TRIAL_INTERVAL = 32

_TRIAL_STEPS = _LEAST_MEASUREMENTS + 1
"""Steps in a row that a trial takes: the first one with drafts also makes up for what steps without them put off."""

_STEPS_BETWEEN_LOOKS = 128
"""Steps for which none remains none while the batch is the same: choosing takes time, and nothing is learned."""

_STEPS_AWAKE = 8
"""The last of them, which are timed, to know the pace before a trial; the others are not, which takes time too."""

_LEVELS = 32
"""Sequences whose acceptance rounds to the same of so many levels are treated alike."""


class StepTimes:
    """Times of a step by mean number of drafts a sequence, for batches of one size, over that of a step without any.

    They are told from the pace, the seconds of a step without drafts now, which follows every step: compared with one
    of a slower hour, any depth would look fast.

    Attributes:
        until_trial: Steps to go until another depth is tried.
        until_next_look: Steps to go until it is asked again what is best.
        is_paced: The pace is that of steps now.
    """

    def __init__(self, max_depth: int) -> None:
        """Know nothing."""
        self._pace_s = 1.0
        self._paces: list[float] = []
        self.is_paced = True
        self._ratios: list[float | None] = [None] * (max_depth + 1)
        self._first: list[list[float]] = [[] for _ in range(max_depth + 1)]
        self.until_trial = _LEAST_TRIAL_INTERVAL
        self.until_next_look = 0
        self._num_trials = 0
        self._trial_depth = self._trial_steps = self._steps_to_land = 0
        self._usual_s = self._lost_steps = 0.0

    @property
    def is_known(self) -> bool:
        """Say whether a step without drafts has been measured."""
        return self._ratios[0] is not None

    def measure(self, depth: int, duration_s: float) -> None:
        """Add a step. A depth counts as measured after some; the first may have set up what later ones find."""
        ratio = duration_s / self._pace_s
        if not self.is_paced and self.is_known:
            self._find_pace(duration_s / self.all()[depth])
            return
        first = self._first[depth]
        if len(first) < _LEAST_MEASUREMENTS:
            first.append(ratio)
            if len(first) == _LEAST_MEASUREMENTS:
                self._begin_with(depth, statistics.median(first))
            return
        known = self._ratios[depth]
        assert known is not None
        error = min(ratio / known, _LONGEST_TRUSTED) - 1.0
        self._pace_s *= 1.0 + _PACE_WEIGHT * error
        if depth:
            self._ratios[depth] = known * (1.0 + _RATIO_WEIGHT * error)

    def come_back(self) -> None:
        """Say that steps of another size came in between."""
        self._paces.clear()
        self.is_paced = False

    def _find_pace(self, pace_s: float) -> None:
        self._paces.append(pace_s)
        if len(self._paces) == _STEPS_TO_PACE:
            self._pace_s, self.is_paced = statistics.median(self._paces), True

    def _begin_with(self, depth: int, ratio: float) -> None:
        """Take in what a depth's first steps took, or those of a trial, which are half of what is known then."""
        known = self._ratios[depth]
        if known is not None:
            ratio = known + _TRIAL_WEIGHT * (ratio - known)
        self._ratios[depth] = ratio
        if depth == 0:
            self._pace_s *= ratio
            self._ratios = [None if other is None else other / ratio for other in self._ratios]

    def start_trial(self, best: int, hoped: int) -> None:
        """Begin a trial, whose depth is then measured anew.

        Where drafts pay, of none, which they are compared with, and in turn with that of what is hoped for.

        Args:
            best: The depth that is best by all that is known.
            hoped: The depth that would be, if drafts were right more often. Deeper ones than were ever tried are come
                to step by step, since the shallow ones tell what the others cost.
        """
        deepest = max(depth for depth, ratio in enumerate(self._ratios) if ratio is not None)
        hoped = max(1, min(hoped, 2 * deepest))
        self._num_trials += 1
        depth = 0 if best and (hoped == best or self._num_trials % 2) else hoped
        expected = self.all()
        self._trial_depth, self._trial_steps = depth, _TRIAL_STEPS
        self._first[depth].clear()
        self._steps_to_land, self._usual_s, self._lost_steps = _TRIAL_STEPS, expected[best] * self._pace_s, 0.0
        self.until_trial = max(
            _LEAST_TRIAL_INTERVAL,
            self._steps_to_spread(_TRIAL_STEPS * abs(expected[depth] - expected[best]) / expected[best]),
        )

    @property
    def is_trying(self) -> bool:
        """Say whether a trial goes on."""
        return self._trial_steps > 0

    def take_trial_step(self) -> int | None:
        """Return the depth to try in this step; None when there is no trial."""
        if not self._trial_steps:
            return None
        self._trial_steps -= 1
        return self._trial_depth

    def rest(self) -> int:
        """Take it for true for some steps that none is best.

        Returns:
            Steps that need not be counted or measured.
        """
        num_steps = max(0, min(_STEPS_BETWEEN_LOOKS, self.until_trial) - _STEPS_AWAKE)
        self.until_next_look = _STEPS_AWAKE
        self.until_trial -= num_steps
        return num_steps

    def rouse(self, num_unspent: int = 0) -> None:
        """Say that what is best may have changed, with so many steps of rest to go."""
        self.until_trial += num_unspent
        self.until_next_look = 0

    def land(self, duration_s: float) -> None:
        """Put the next trial off until what this one has lost, if there is one, is a small share of all."""
        if self._steps_to_land:
            self._steps_to_land -= 1
            self._lost_steps += min(duration_s / self._usual_s, _WORST_LOSS) - 1.0
            self.until_trial = max(self.until_trial, self._steps_to_spread(self._lost_steps))

    def _steps_to_spread(self, num_lost: float) -> int:
        """Return how many steps there must be for one that was lost in so many."""
        return round(num_lost / _TRIAL_COST / max(1.0, _EARLY_TRIALS / self._num_trials))

    def all(self) -> list[float]:
        """Return the ratios of all depths: measured ones, straight lines between them, behind them the last slope."""
        times: list[float] = []
        last, before = 0, 0
        for depth, ratio in enumerate(self._ratios):
            if ratio is None:
                continue
            for between in range(len(times), depth):
                times.append(times[last] + (ratio - times[last]) * (between - last) / (depth - last))
            times.append(ratio)
            before, last = last, depth
        slope = (times[last] - times[before]) / (last - before) if last else times[0] * _GUESSED_SLOPE
        return times + [times[last] + max(0.0, slope) * extra for extra in range(1, len(self._ratios) - last)]


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

    def __init__(self, max_depth: int, *, drafts_predictions: bool = False) -> None:
        """Begin without knowledge.

        Args:
            max_depth: Tokens to draft for a sequence, at most.
            drafts_predictions: Drafts are taken from predictions of the output.
        """
        assert max_depth > 0
        self._max_depth = max_depth
        self._drafts_predictions = drafts_predictions
        self._acceptance = _FIRST_ACCEPTANCE
        self._engine_weight = _ENGINE_WEIGHT
        self._factors = PlaceFactors(max_depth)
        self._times: dict[int, StepTimes] = {}
        self._is_drafting = self._is_changing = False
        self._resting = self._num_sequences = 0
        self._current = StepTimes(max_depth)

    def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
        """Say no where none was best a few steps ago and the batch is the same: choosing takes time as well."""
        self._is_changing = is_changing
        if is_changing:
            self._current.rouse(self._resting)
            self._resting = 0
        elif self._resting and num_sequences == self._num_sequences:
            self._resting -= 1
            return False
        if not num_sequences:
            return False
        times = self._switch_to(num_sequences)
        times.until_trial -= 1
        times.until_next_look -= 1
        return (times.until_next_look <= 0 or times.until_trial < 0 or times.is_trying) and times.is_known

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """Return the depths that make the most tokens a second, or for a trial, others."""
        times = self._switch_to(len(sequences))
        # A step that computes prompts too would not tell what drafts cost.
        can_try = not self._is_changing and times.is_paced
        if can_try and (depth := times.take_trial_step()) is not None:
            return [min(depth, max(0, limit)) for limit in limits]
        self._engine_weight = _ENGINE_WEIGHT * min(1.0, _SMALL_BATCH / len(sequences))
        levels = [round(self._acceptance_of(sequence) * _LEVELS) for sequence in sequences]
        best = self._best_depths(Counter(levels), times.all())
        if can_try and times.until_trial < 0:
            hopeful = [(3 * level + _LEVELS) // 4 for level in levels]
            hoped = self._best_depths(Counter(hopeful), times.all())
            num_best, num_hoped = sum(map(best.__getitem__, levels)), sum(map(hoped.__getitem__, hopeful))
            times.start_trial(_mean_depth(num_best, len(sequences)), _mean_depth(num_hoped, len(sequences)))
            return self.depths(sequences, limits)
        if not any(best.values()) and not times.is_trying:
            self._resting, self._is_drafting = times.rest(), False
        return [min(best[level], max(0, limit)) for level, limit in zip(levels, limits, strict=True)]

    def learn(self, sequence: Sequence, num_drafted: int, accepted: tuple[int, ...]) -> None:
        """Move the sequence's share of right drafts, and the engine's, which new sequences begin with."""
        foretold = itertools.accumulate([self._acceptance_of(sequence)] * min(num_drafted, self._max_depth), mul)
        self._factors.learn(list(foretold), accepted)
        acceptance = self._own_acceptance(sequence)
        # Those behind the first wrong one were not put to the test.
        for is_right in [True] * len(accepted) + [False] * (len(accepted) < num_drafted):
            acceptance += _SEQUENCE_WEIGHT * (is_right - acceptance)
            self._acceptance += self._engine_weight * (is_right - self._acceptance)
        sequence.acceptance = acceptance

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        """Move the time of steps like this one, unless the clock is too coarse to tell."""
        if duration_s <= 0 or (self._resting and num_sequences == self._num_sequences):
            return
        depth = min(self._max_depth, _mean_depth(num_drafted, num_sequences))
        is_first, self._is_drafting = depth > 0 and not self._is_drafting, depth > 0
        times = self._switch_to(num_sequences)
        times.land(duration_s)
        if not is_first:
            times.measure(depth, duration_s)

    def _switch_to(self, num_sequences: int) -> StepTimes:
        """Return the times of batches of this size; if it is another than before, any rest ends."""
        if num_sequences == self._num_sequences:
            return self._current
        self._num_sequences = num_sequences
        self._current.rouse(self._resting)
        self._resting = 0
        size = num_sequences.bit_length()
        if size not in self._times:
            self._current = self._times[size] = StepTimes(self._max_depth)
        elif self._times[size] is not self._current:
            self._current = self._times[size]
            self._current.come_back()
        self._current.rouse()
        return self._current

    def _best_depths(self, counts: Counter[int], times: list[float]) -> Counter[int]:
        """Return the depths that make the most tokens a second.

        Args:
            counts: Sequences, by the level of their acceptance.
            times: Of a step, by drafts a sequence.

        Returns:
            Depths, by the same levels.
        """
        factors = self._factors.all()
        chances = []
        for level in counts:
            foretold, chance = 1.0, _BEST_CHANCE
            for factor in factors:
                foretold *= level / _LEVELS
                # Those of a sequence come in their order, since each is at most as likely as the one before.
                chance = min(chance, foretold * factor)
                chances.append((chance, level))
        chances.sort(key=itemgetter(0), reverse=True)
        num_sequences = counts.total()
        num_best, fastest = 0, num_sequences / times[0] * _LEAST_GAIN
        num_tokens, num_drafted = float(num_sequences), 0
        for place, (chance, level) in enumerate(chances, start=1):
            num_tokens += chance * counts[level]
            num_drafted += counts[level]
            speed = num_tokens / times[_mean_depth(num_drafted, num_sequences)]
            if speed > fastest:
                num_best, fastest = place, speed
        return Counter(level for _, level in chances[:num_best])

    def _acceptance_of(self, sequence: Sequence) -> float:
        own = self._own_acceptance(sequence)
        return own + _SHARED * (self._acceptance - own)

    def _own_acceptance(self, sequence: Sequence) -> float:
        if sequence.acceptance is not None:
            return sequence.acceptance
        return _PREDICTED_ACCEPTANCE if self._drafts_predictions and sequence.prediction else self._acceptance


def _mean_depth(num_drafted: int, num_sequences: int) -> int:
    """Return the drafts a sequence, rounded up: the first draft of a step may cost more than any other."""
    return -(-num_drafted // num_sequences)
