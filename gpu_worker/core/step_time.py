"""How long a step takes, learned from the steps that have landed.

The model is a sum: a fixed part, a part for each interactive sequence, one for each batch sequence, and one for each
token of a sequence beyond its first (chunks of prompts, drafts). Lanes have costs of their own because their contexts
may differ in length. All parts stay positive.

A Kalman filter estimates the parts: they drift slowly, and a step's duration is their sum with noise in proportion to
it. Its covariance knows which parts the steps so far have told apart. Kaczmarz' method, which corrects parts by their
share alone, needs thousands of steps to tell a small part from a large one.
"""

from __future__ import annotations

import math

from gpu_worker.core.step import StepPlan

_FIRST_WEIGHTS = (1.0, 0.2, 0.2, 0.05)
"""What the parts are to one another until steps of different sizes have been measured: a small model on a CPU, where
another sequence costs most. A guess too high is corrected by the few steps that try more. These are the standard
deviations of the first guess too."""

_NOISE = 0.1
"""Standard deviation of a step's duration, as a share of it."""

_DRIFT = 0.002
"""Standard deviation of a part's change from one step to the next, as a share of it."""

_LARGEST_ERROR = 0.4
_LARGEST_DEVIATION = 3.0
"""A step that errs by more than both, as a share of what was predicted and in standard deviations of the prediction, is
taken for a disturbance, and counts as no more."""

_LEAST_SHARE = 1e-4
"""No part is less than this share of a step."""


class StepTimeModel:
    """Predicts durations in seconds. Written by the scheduler when a step lands."""

    def __init__(self) -> None:
        """Know nothing."""
        self._costs_s: list[float] = []
        self._covariance: list[list[float]] = []

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
            self._begin(counts, duration_s)
        self._drift()
        predicted = self.predict(*counts[1:])
        used = [(part, count) for part, count in enumerate(counts) if count]
        # Covariance of each part with the prediction.
        shared = [sum([row[part] * count for part, count in used]) for row in self._covariance]
        variance = sum([shared[part] * count for part, count in used]) + (_NOISE * predicted) ** 2
        largest = max(_LARGEST_ERROR * predicted, _LARGEST_DEVIATION * math.sqrt(variance))
        error = max(-largest, min(largest, duration_s - predicted))
        least = _LEAST_SHARE * predicted
        for part, covariance in enumerate(shared):
            gain = covariance / variance
            self._costs_s[part] = max(min(least, self._costs_s[part]), self._costs_s[part] + gain * error)
            row = self._covariance[part]
            for other, its in enumerate(shared):
                row[other] -= gain * its

    def _begin(self, counts: tuple[int, ...], duration_s: float) -> None:
        """Guess all parts from the first step."""
        scale = duration_s / sum([weight * count for weight, count in zip(_FIRST_WEIGHTS, counts, strict=True)])
        self._costs_s = [weight * scale for weight in _FIRST_WEIGHTS]
        size = range(len(_FIRST_WEIGHTS))
        self._covariance = [[self._costs_s[i] ** 2 if i == j else 0.0 for j in size] for i in size]

    def _drift(self) -> None:
        """Be less sure of every part than a step ago, but no less than of the first guess."""
        # About what the fixed part was guessed to be from a step like the present ones.
        scale = sum(self._costs_s) / sum(_FIRST_WEIGHTS)
        for part, weight in enumerate(_FIRST_WEIGHTS):
            row = self._covariance[part]
            row[part] += (_DRIFT * self._costs_s[part]) ** 2
            limit = (weight * scale) ** 2
            if row[part] > limit:
                # The same factor for row and column: it stays a covariance.
                factor = math.sqrt(limit / row[part])
                for other, others in enumerate(self._covariance):
                    row[other] *= factor
                    others[part] *= factor
