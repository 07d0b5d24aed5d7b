"""Chooses how many drafts a step verifies: a bandit whose arms are depths, the mean number of drafts of a sequence.

The value of a depth is the expected tokens of a step over its expected time: from each sequence's share of accepted
drafts, and from measured times (`StepCosts`). Now and then a few steps explore another depth. Drafts and explorations
may lose time only out of a budget: `_LOST_SHARE` of the time of all steps, and what drafts have gained lately. When it
is spent, drafts that lose are suspended. So the time lost stays within the share, however wrong the estimates are. An
exploration waits until the budget holds what the one before it lost.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from functools import partial
from operator import mul

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step_costs import MEASURED_STEPS, PAUSE, StepCosts, steady_mean

_FIRST_ACCEPTANCE = 0.6
"""Acceptance rate that is assumed before any draft has been verified."""

_SEQUENCE_WEIGHT = 0.05
_ENGINE_WEIGHT = 0.01
"""Weights of one draft in the moving averages of the acceptance rate: its sequence's, and the whole engine's."""

_LEAST_GAIN = 1.03
"""How much faster drafts must be expected to be, so that what remains of noise does not make them slower."""

_BACK_OFF_STEPS = 64
"""Steps without drafts, at most, before the policy looks again whether drafts pay."""

_LOST_SHARE = 0.01
"""Share of all time that may be lost to drafts and explorations."""

_FIRST_BUDGET_STEPS = 16
_MOST_BUDGET_STEPS = 64
"""The budget, in steps without drafts: at the beginning, and the most saved beyond the price of an exploration."""

_LEAST_RUN_STEPS = 8
"""Plain steps that drafts found to pay may lose beyond the budget, because an exploration may have spent that."""

_FIRST_RUN_STEPS = 16
_LONGEST_RUN_STEPS = 512
"""Drafts that begin to be exploited are compared with steps without any as soon: what pays in a few may not in many.
Each time that they have paid they go on for twice as long, up to the limit."""

_LONGEST_LOSS_STEPS = 100
"""What one step of an exploration may lose: it may have been long because the host paused."""


class _Run:
    """Steps with drafts until an exploration of steps without any, which shows what those take."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._plain_steps = 0.0
        self.plain_s: list[float] = []

    def add(self, duration_s: float, plain_steps: float) -> None:
        self._budget_s += _LOST_SHARE * duration_s - duration_s
        self._plain_steps += plain_steps

    def budget_s(self, plain_s: float) -> float:
        """Return the remaining budget if a step without drafts takes `plain_s`."""
        return self._budget_s + self._plain_steps * plain_s


class AdaptiveDepth:
    """A policy of speculation. One for an engine; also writes `Sequence.acceptance`."""

    def __init__(self, max_depth: int, *, drafts_predictions: bool = False) -> None:
        assert max_depth > 0
        self._max_depth, self._drafts_predictions = max_depth, drafts_predictions
        self._acceptance = _FIRST_ACCEPTANCE
        # By place in a draft: how often tokens were accepted, and how often they should have been by the acceptance.
        self._accepted, self._expected = [0.5] * max_depth, [0.5] * max_depth
        self._costs: defaultdict[int, StepCosts] = defaultdict(partial(StepCosts, max_depth))
        self._num_sequences = self._num_backing_off = self._num_exploring = self._num_explorations = 0
        self._explored = self._num_accepted = self._size = 0
        # Tokens by units of cost at the depth that is exploited.
        self._exploited_speed = 0.0
        self._is_changing = self._is_exploration = self._is_asking = False
        self._has_budget, self._budget_s, self._least_budget_s = False, 0.0, 0.0
        self._run: _Run | None = None
        self._num_run_steps = _FIRST_RUN_STEPS

    @property
    def is_backing_off(self) -> bool:
        """Return whether the next step drafts nothing."""
        return self._num_backing_off > 0

    def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
        """Say no while the policy backs off, which ends when more or fewer sequences decode."""
        if num_sequences != self._num_sequences:
            self._switch_to(num_sequences)
        if self._num_backing_off:
            self._num_backing_off -= 1
            return False
        self._is_changing, self._is_exploration, self._is_asking, self._num_accepted = is_changing, False, False, 0
        return num_sequences > 0 and self._costs[num_sequences.bit_length()].is_known

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """Return the depths that make the most tokens a second, or those to explore."""
        costs = self._costs[len(sequences).bit_length()]
        # Rounded to half of what one draft changes, so that similar sequences are looked at together.
        unit = _SEQUENCE_WEIGHT / 2
        rounded = [round(self._acceptance_of(sequence) / unit) * unit for sequence in sequences]
        if not self._num_exploring or self._is_changing:
            best, speed = self._best_depths(rounded, costs.all())
            if costs.is_suspended:
                best, speed = [0] * len(best), len(best) / costs.all()[0]
            self._exploited_speed = speed
            is_affordable = costs.exploration_s <= self._budget_of(costs)
            num_steps_left = math.ceil(costs.until_exploration)
            if not any(best):
                # To try drafts costs time. Steps without any, to which those that pay are compared, do not wait.
                self._run, num_steps_left = None, self._num_steps_to_exploration(costs)
            if self._is_changing or num_steps_left > 0:
                if not any(best):
                    self._num_backing_off = max(0, min(_BACK_OFF_STEPS, num_steps_left - 1))
                self._is_asking = any(best)
                return [min(depth, max(0, limit)) for depth, limit in zip(best, limits, strict=True)]
            optimistic = [(3 * acceptance + 1) / 4 for acceptance in rounded]
            hoped, _ = self._best_depths(optimistic, costs.all(is_exploration=True))
            self._explore(costs, _mean(best), _mean(hoped) if is_affordable else _mean(best))
        self._num_exploring -= 1
        self._is_exploration = True
        if not self._explored:
            # Steps without drafts follow one another without waiting, so they are timed as in a back-off.
            self._num_backing_off, self._num_exploring = self._num_exploring, 0
        return [min(self._explored, max(0, limit)) for limit in limits]

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Move the sequence's acceptance rate, and that of all."""
        acceptance = self._acceptance_of(sequence)
        self._num_accepted += num_accepted
        for place, expected in enumerate(itertools.accumulate([acceptance] * min(num_drafted, self._max_depth), mul)):
            self._expected[place] += _ENGINE_WEIGHT * (expected - self._expected[place])
            self._accepted[place] += _ENGINE_WEIGHT * ((place < num_accepted) - self._accepted[place])
        # Those behind the first rejected one were not put to the test.
        for is_accepted in [True] * num_accepted + [False] * (num_accepted < num_drafted):
            acceptance += _SEQUENCE_WEIGHT * (is_accepted - acceptance)
            self._acceptance += _ENGINE_WEIGHT * (is_accepted - self._acceptance)
        sequence.acceptance = acceptance

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        """Learn from how long a step took, unless the clock is too coarse to tell."""
        if duration_s <= 0:
            return
        depth, costs = min(self._max_depth, -(-num_drafted // num_sequences)), self._costs[num_sequences.bit_length()]
        if self._has_budget and costs.is_known:
            num_tokens = num_sequences + (self._num_accepted if num_drafted else 0)
            self._account(costs, depth, num_tokens, num_sequences, duration_s)
        # A step whose proposer was asked and found nothing does not show what steps without drafts cost.
        if depth or not (self._is_exploration and self._explored):
            costs.measure(depth, duration_s, is_exploration=self._is_exploration)
        if self._is_exploration and not self._explored and self._run is not None:
            self._run.plain_s.append(duration_s)
            if len(self._run.plain_s) == MEASURED_STEPS:
                # What the drafts since the last exploration have lost is known better now than step by step.
                plain_s = (steady_mean(self._run.plain_s) + costs.plain_s) / 2
                self._budget_s = min(self._budget_s, self._run.budget_s(plain_s))
                costs.is_suspended, self._run = self._budget_s < 0.0, None
                self._num_run_steps = min(2 * self._num_run_steps, _LONGEST_RUN_STEPS)
                costs.until_exploration = self._num_run_steps

    def _switch_to(self, num_sequences: int) -> None:
        size = num_sequences.bit_length()
        if size != self._num_sequences.bit_length():
            self._num_exploring = 0
        # Between two requests nothing decodes, which is no other size.
        if size and size != self._size:
            self._size, self._run = size, None
            self._costs[size].resume()
        self._num_sequences, self._num_backing_off = num_sequences, 0

    def _account(self, costs: StepCosts, depth: int, num_tokens: int, num_sequences: int, duration_s: float) -> None:
        plain_s, lost_s = costs.plain_s, 0.0
        if self._is_exploration:
            lost_s = duration_s - num_tokens * costs.speed_s(self._exploited_speed)
            lost_s = min(lost_s, _LONGEST_LOSS_STEPS * plain_s)
            costs.price_s = (costs.price_s or 0.0) + lost_s
            if self._run is None:
                costs.until_exploration += max(0.0, lost_s) / (_LOST_SHARE * plain_s)
        elif self._is_asking:
            # A pause of the host would have made a step without drafts as long.
            duration_s = min(duration_s, PAUSE * costs.seconds(depth))
            if self._run is None:
                self._run = _Run(self._budget_s)
                self._least_budget_s = min(0.0, self._budget_s) - _LEAST_RUN_STEPS * plain_s
                if self._explored:
                    costs.until_exploration = self._num_run_steps = _FIRST_RUN_STEPS
            num_plain_steps = num_tokens / num_sequences
            self._run.add(duration_s, num_plain_steps)
            lost_s = duration_s - num_plain_steps * plain_s
        most_s = costs.exploration_s + _MOST_BUDGET_STEPS * plain_s
        self._budget_s = min(self._budget_s + _LOST_SHARE * duration_s - lost_s, most_s)
        if self._is_asking:
            costs.is_suspended = self._budget_s < self._least_budget_s

    def _num_steps_to_exploration(self, costs: StepCosts) -> int:
        missing_s = costs.exploration_s - self._budget_of(costs)
        return math.ceil(max(costs.until_exploration, missing_s / (_LOST_SHARE * costs.plain_s)))

    def _budget_of(self, costs: StepCosts) -> float:
        if not self._has_budget:
            self._has_budget, self._budget_s = True, _FIRST_BUDGET_STEPS * costs.plain_s
        return self._budget_s

    def _explore(self, costs: StepCosts, best: int, hoped: int) -> None:
        """Choose no drafts, which others are compared with, or the depth that is best if more drafts are accepted."""
        self._num_explorations += 1
        is_new = self._num_run_steps < _BACK_OFF_STEPS
        self._explored = 0 if best and (hoped == best or is_new or self._num_explorations % 2) else max(1, hoped)
        self._num_exploring = MEASURED_STEPS
        costs.until_exploration = self._num_run_steps if best else _BACK_OFF_STEPS
        costs.price_s, costs.is_suspended = 0.0, False

    def _best_depths(self, acceptances: list[float], costs: list[float]) -> tuple[list[int], float]:
        """Return the depths, by sequence, that make the most tokens a second, and how many by unit of cost."""
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
        speed = fastest if num_best else num_sequences / costs[0]
        return [depths[acceptance] for acceptance in acceptances], speed

    def _acceptance_of(self, sequence: Sequence) -> float:
        if sequence.acceptance is not None:
            return sequence.acceptance
        # Drafts from a prediction are accepted more often, whatever others were like.
        return (1 + _FIRST_ACCEPTANCE) / 2 if self._drafts_predictions and sequence.prediction else self._acceptance


def _mean(depths: list[int]) -> int:
    """Return the mean depth, rounded up: the first draft of a step may cost more than any other."""
    return -(-sum(depths) // len(depths))
