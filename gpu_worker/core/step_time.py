"""How long a step takes, learned from the steps that have landed.

The model is a sum: a fixed part, a part for each interactive sequence, one for each batch sequence, and one for each
token of a sequence beyond its first (chunks of prompts, drafts). Lanes have costs of their own because their contexts
may differ in length. All parts stay positive. Every step corrects the parts in proportion to their share in what was
predicted (Kaczmarz' method on logarithms), so a part that a step does not use is not changed by it.
"""

from __future__ import annotations

import math

from gpu_worker.core.step import StepPlan

_FIRST_WEIGHTS = (1.0, 0.2, 0.2, 0.05)
"""What the parts are to one another until steps of different sizes have been measured: a small model on a CPU, where
another sequence costs most. A guess too high is corrected by the few steps that try more."""

_LEAST_RATE = 0.02
"""How much of a step's error is corrected once a part is known; the n-th step of a part corrects 1/n before that."""

_NUM_EARLY_STEPS = 10
_LARGEST_EARLY_ERROR = math.log(8.0)
_LARGEST_ERROR = math.log(1.5)
"""A step that errs more than this is taken for a disturbance, and counts as no more."""


class StepTimeModel:
    """Predicts durations in seconds. Written by the scheduler when a step lands."""

    def __init__(self) -> None:
        """Know nothing."""
        self._costs_s: list[float] = []
        self._num_steps = [0] * len(_FIRST_WEIGHTS)

    @property
    def is_known(self) -> bool:
        """Say whether a step has been measured."""
        return bool(self._costs_s)

    @property
    def fixed_s(self) -> float:
        """What a step takes whatever is in it."""
        return self._costs_s[0]

    @property
    def batch_sequence_s(self) -> float:
        """What a batch sequence adds with its first token."""
        return self._costs_s[2]

    @property
    def token_s(self) -> float:
        """What each further token of a sequence adds."""
        return self._costs_s[3]

    def predict(self, num_interactive: int, num_batch: int, num_more_tokens: int) -> float:
        """Return how long a step takes with so many sequences, and tokens beyond the first of each."""
        fixed, interactive, batch, token = self._costs_s
        return fixed + interactive * num_interactive + batch * num_batch + token * num_more_tokens

    def observe_step(self, plan: StepPlan, num_drafted: int, duration_s: float) -> None:
        """Take in how long a step took that computed `num_drafted` drafts beside its plan."""
        num_batch = sum([item.sequence.lane == "batch" for item in plan.scheduled])
        num_sequences = len(plan.scheduled)
        num_more_tokens = plan.num_tokens - num_sequences + num_drafted
        self.observe(num_sequences - num_batch, num_batch, num_more_tokens, duration_s)

    def observe(self, num_interactive: int, num_batch: int, num_more_tokens: int, duration_s: float) -> None:
        """Take in how long a step took."""
        if duration_s <= 0.0:
            return
        counts = (1, num_interactive, num_batch, num_more_tokens)
        if not self._costs_s:
            scale = duration_s / sum(map(float.__mul__, _FIRST_WEIGHTS, map(float, counts)))
            self._costs_s = [weight * scale for weight in _FIRST_WEIGHTS]
        used = [part for part, count in enumerate(counts) if count]
        predicted = self.predict(*counts[1:])
        is_early = min([self._num_steps[part] for part in used]) < _NUM_EARLY_STEPS
        largest = _LARGEST_EARLY_ERROR if is_early else _LARGEST_ERROR
        error = max(-largest, min(largest, math.log(duration_s / predicted)))
        shares = [self._costs_s[part] * counts[part] / predicted for part in used]
        error /= sum([share * share for share in shares])
        for part, share in zip(used, shares, strict=True):
            self._num_steps[part] += 1
            rate = max(_LEAST_RATE, 1.0 / self._num_steps[part])
            self._costs_s[part] *= math.exp(max(-largest, min(largest, rate * share * error)))
