"""Chooses how many drafts a step verifies: a bandit whose arms are depths, the mean number of drafts of a sequence.

The value of a depth is the expected tokens of a step over its expected time. Tokens follow from each sequence's own
share of accepted drafts, and from how that share holds at each place of a draft; times are measured (`StepCosts`). The
best depth is exploited. Now and then a few steps explore another, as rarely as they turn out to be expensive. Where no
drafts are best the policy backs off: it is not asked for some steps, as long as the batch is the same.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from functools import partial
from operator import mul

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step_costs import MEASURED_STEPS, StepCosts

_FIRST_ACCEPTANCE = 0.6
_SEQUENCE_WEIGHT = 0.05
_ENGINE_WEIGHT = 0.01
"""Of a draft in what is known of its sequence, and of all."""

_LEAST_GAIN = 1.03
"""How much faster drafts must be expected to be, so that what remains of noise does not make them slower."""

_BACK_OFF_STEPS = 64


class AdaptiveDepth:
    """A policy of speculation. One for an engine; also writes `Sequence.acceptance`."""

    def __init__(self, max_depth: int, *, drafts_predictions: bool = False) -> None:
        """Draft up to `max_depth` tokens for a sequence, perhaps from predictions that clients send."""
        assert max_depth > 0
        self._max_depth, self._drafts_predictions = max_depth, drafts_predictions
        self._acceptance = _FIRST_ACCEPTANCE
        # By place in a draft: how often tokens were accepted, and how often they should have been by the acceptance.
        self._accepted, self._expected = [0.5] * max_depth, [0.5] * max_depth
        self._costs: defaultdict[int, StepCosts] = defaultdict(partial(StepCosts, max_depth))
        self._num_sequences = self._num_backing_off = self._num_exploring = self._num_explorations = 0
        self._explored = self._exploited = self._num_accepted = 0
        self._is_changing = self._is_exploration = False

    @property
    def is_backing_off(self) -> bool:
        """Say whether the next step drafts nothing."""
        return self._num_backing_off > 0

    def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
        """Say no while the policy backs off, which ends when more or fewer sequences decode."""
        if num_sequences != self._num_sequences:
            self._switch_to(num_sequences)
        if self._num_backing_off:
            self._num_backing_off -= 1
            return False
        self._is_changing, self._is_exploration, self._num_accepted = is_changing, False, 0
        return num_sequences > 0 and self._costs[num_sequences.bit_length()].is_known

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """Return the depths that make the most tokens a second, or those to explore."""
        costs = self._costs[len(sequences).bit_length()]
        # Rounded to half of what one draft changes, so that similar sequences are looked at together.
        unit = _SEQUENCE_WEIGHT / 2
        rounded = [round(self._acceptance_of(sequence) / unit) * unit for sequence in sequences]
        if not self._num_exploring or self._is_changing:
            best = self._best_depths(rounded, costs.all())
            if self._is_changing or costs.until_exploration > 0:
                if not any(best):
                    self._num_backing_off = max(0, min(_BACK_OFF_STEPS, int(costs.until_exploration) - 1))
                return [min(depth, max(0, limit)) for depth, limit in zip(best, limits, strict=True)]
            optimistic = [(3 * acceptance + 1) / 4 for acceptance in rounded]
            self._explore(costs, _mean(best), _mean(self._best_depths(optimistic, costs.all(is_exploration=True))))
        self._num_exploring -= 1
        self._is_exploration = True
        if not self._explored:
            # Steps without drafts follow one another without waiting, so they are timed as in a back-off.
            self._num_backing_off, self._num_exploring = self._num_exploring, 0
        return [min(self._explored, max(0, limit)) for limit in limits]

    def learn(self, sequence: Sequence, num_drafted: int, accepted: tuple[int, ...]) -> None:
        """Move the sequence's acceptance rate, and that of all."""
        acceptance = self._acceptance_of(sequence)
        self._num_accepted += len(accepted)
        for place, expected in enumerate(itertools.accumulate([acceptance] * min(num_drafted, self._max_depth), mul)):
            self._expected[place] += _ENGINE_WEIGHT * (expected - self._expected[place])
            self._accepted[place] += _ENGINE_WEIGHT * ((place in accepted) - self._accepted[place])
        # Those behind the first rejected one were not put to the test.
        for is_accepted in [True] * len(accepted) + [False] * (len(accepted) < num_drafted):
            acceptance += _SEQUENCE_WEIGHT * (is_accepted - acceptance)
            self._acceptance += _ENGINE_WEIGHT * (is_accepted - self._acceptance)
        sequence.acceptance = acceptance

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        """Learn from how long a step took, unless the clock is too coarse to tell."""
        if duration_s <= 0:
            return
        depth, costs = min(self._max_depth, -(-num_drafted // num_sequences)), self._costs[num_sequences.bit_length()]
        if self._is_exploration:
            # Work that earlier steps deferred counts as lost; what drafts brought where none is best counts as gained.
            num_lost = costs.num_steps(self._exploited, duration_s) - 1.0
            costs.charge(abs(num_lost) if self._exploited else num_lost - self._num_accepted / num_sequences)
        # A step whose proposer was asked and found nothing does not show what steps without drafts cost.
        if depth or not (self._is_exploration and self._explored):
            costs.measure(depth, duration_s, is_exploration=self._is_exploration)

    def _switch_to(self, num_sequences: int) -> None:
        if num_sequences.bit_length() != self._num_sequences.bit_length():
            self._num_exploring = 0
            self._costs[num_sequences.bit_length()].resume()
        self._num_sequences, self._num_backing_off = num_sequences, 0

    def _explore(self, costs: StepCosts, best: int, hoped: int) -> None:
        """Choose no drafts, which others are compared with, or the depth that is best if more drafts are accepted."""
        self._num_explorations += 1
        self._explored = 0 if best and (hoped == best or self._num_explorations % 2) else max(1, hoped)
        self._num_exploring, self._exploited = MEASURED_STEPS, best
        costs.until_exploration = _BACK_OFF_STEPS

    def _best_depths(self, acceptances: list[float], costs: list[float]) -> list[int]:
        """Return the depths, by sequence, that make the most tokens a second."""
        chances, counts, num_sequences = [], Counter(acceptances), len(acceptances)
        for acceptance in counts:
            chance = 1.0
            for place, (accepted, expected) in enumerate(zip(self._accepted, self._expected, strict=True), start=1):
                # Drafts of a sequence come in their order: each is at most as likely as the one before.
                chance = min(chance, acceptance**place * accepted / expected)
                chances.append((chance, acceptance))
        chances.sort(reverse=True)
        num_tokens, num_drafted, num_best, fastest = float(num_sequences), 0, 0, _LEAST_GAIN * num_sequences / costs[0]
        for count, (chance, acceptance) in enumerate(chances, start=1):
            num_tokens, num_drafted = num_tokens + chance * counts[acceptance], num_drafted + counts[acceptance]
            depth = -(-num_drafted // num_sequences)
            if depth >= len(costs):
                break
            if num_tokens / costs[depth] > fastest:
                num_best, fastest = count, num_tokens / costs[depth]
        depths = Counter(acceptance for _, acceptance in chances[:num_best])
        return [depths[acceptance] for acceptance in acceptances]

    def _acceptance_of(self, sequence: Sequence) -> float:
        if sequence.acceptance is not None:
            return sequence.acceptance
        # Drafts from a prediction are accepted more often, whatever others were like.
        return (1 + _FIRST_ACCEPTANCE) / 2 if self._drafts_predictions and sequence.prediction else self._acceptance


def _mean(depths: list[int]) -> int:
    """Return the mean depth, rounded up: the first draft of a step may cost more than any other."""
    return -(-sum(depths) // len(depths))
