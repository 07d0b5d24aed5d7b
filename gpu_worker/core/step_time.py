"""How long a step takes, learned from the steps that have landed.

A sum of a fixed part, one for each interactive and each batch sequence, and one for each token beyond the first. An
extended Kalman filter estimates their logarithms, so that all stay positive; its covariance knows which parts the steps
so far have told apart. Corrections by the parts' shares alone (Kaczmarz' method) need thousands of steps for that, and
the parts themselves instead of their logarithms become zero where two of them cannot be told apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values
from operator import mul

from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.core.step import SampledTokens, ScheduledSequence, ScheduledStep, StepResult

_FIRST_WEIGHTS = (1.0, 0.2, 0.2, 0.05)
"""What the parts are to one another until steps of different sizes have been measured: a small model on a CPU, where
another sequence costs most. A first estimate that is too high is corrected by the few steps that try more."""

_FIRST_DEVIATION = 1.0
"""Standard deviation of a first estimate; also the most that a part becomes uncertain again. All are of logarithms."""

_NOISE = 0.1
"""Standard deviation of a measured duration."""

_DRIFT = 0.002
"""Standard deviation of a part's change from one step to the next."""

_SURE_DEVIATIONS = 2.0
"""Standard deviations below its estimate above which a part certainly is."""

_SURE_OF_BATCH = 0.25
"""Standard deviation up to which what batch work takes counts as learned."""

_SURE_OF_TOKENS = 0.9
"""Standard deviation below which steps have told something of tokens: without prompts it stays the first one."""

_LARGEST_ERROR = 0.4
_LARGEST_DEVIATION = 3.0
"""A step that errs by more than both, the second in standard deviations of the prediction, is taken for a disturbance,
and counts as no more."""

_SURPRISES = 3
"""Such steps in a row, all longer or all shorter, are no disturbance: the parts that were in them are learned anew."""

_ALIKE_STEPS = 4
"""Steps in a row of equal sequences and tokens, of which one is learned from: the others tell little more."""


class StepTimeModel:
    """Predicts durations in seconds. Written by the scheduler when a step lands."""

    def __init__(self) -> None:
        self._costs_s: list[float] = []
        self._covariance: list[list[float]] = []
        self._last_kind = (0, 0, 0)
        self._num_alike = 0
        # Steps in a row that erred by too much: above 0 longer ones, below 0 shorter ones.
        self._num_surprises = 0

    @property
    def is_known(self) -> bool:
        """Return whether a step has been measured."""
        return bool(self._costs_s)

    @property
    def costs_s(self) -> tuple[float, float, float, float]:
        """What a step takes whatever is in it, and what interactive and batch sequences and further tokens add."""
        fixed, interactive, batch, token = self._costs_s or _FIRST_WEIGHTS
        return fixed, interactive, batch, token

    @property
    def fixed_s(self) -> float:
        """What a step takes whatever is in it."""
        return self._costs_s[0]

    @property
    def batch_sequence_s(self) -> float:
        """What a batch sequence adds with its first token: no less than a further token is sure to add.

        Steps of few kinds may let the filter take it for next to nothing, and the next step would be filled with
        sequences that cost more than all the rest of it.
        """
        sure_token_s = self._costs_s[3] * math.exp(-_SURE_DEVIATIONS * math.sqrt(self._covariance[3][3]))
        return max(self._costs_s[2], sure_token_s)

    @property
    def is_sure_of_batch(self) -> bool:
        """Return whether steps have told what batch sequences and their prompts take."""
        return max(self._covariance[2][2], self._covariance[3][3]) <= _SURE_OF_BATCH**2

    def prefill_rate(self, num_tokens: int) -> float:
        """Return a prompt's tokens per second in steps of that many; 0 until steps have told what tokens take."""
        if not self._costs_s or self._covariance[3][3] > _SURE_OF_TOKENS**2:
            return 0.0
        return num_tokens / self.predict(1, 0, num_tokens - 1)

    @property
    def token_s(self) -> float:
        """What each further token of a sequence adds."""
        return self.costs_s[3]

    def predict(self, num_interactive: int, num_batch: int, num_more_tokens: int) -> float:
        """Return how long a step takes, by its sequences and its tokens beyond the first of each."""
        fixed, interactive, batch, token = self._costs_s
        return fixed + interactive * num_interactive + batch * num_batch + token * num_more_tokens

    @property
    def low_token_s(self) -> float:
        """What each further token adds, by a standard deviation less than expected."""
        return self.token_s * math.exp(-math.sqrt(self._covariance[3][3]))

    def low_step_s(self, plan: ScheduledStep, num_drafted: int) -> float:
        """Return what a step takes without the images that it encodes, by a standard deviation less than expected."""
        counts = (1, *_kind(plan, num_drafted))
        parts = [cost * count for cost, count in zip(self._costs_s, counts, strict=True)]
        total, rows = sum(parts), zip(parts, self._covariance, strict=True)
        variance = sum([part * sum(map(mul, row, parts)) for part, row in rows]) / total**2
        return total * math.exp(-math.sqrt(max(0.0, variance)))

    def observe_step(self, plan: ScheduledStep, num_drafted: int, duration_s: float) -> None:
        """Learn from a step that computed `num_drafted` drafts besides its plan."""
        kind = _kind(plan, num_drafted)
        self._num_alike = self._num_alike + 1 if kind == self._last_kind else 0
        self._last_kind = kind
        if self._num_alike % _ALIKE_STEPS == 0:
            self.observe(*kind, duration_s)

    def observe(self, num_interactive: int, num_batch: int, num_more_tokens: int, duration_s: float) -> None:
        """Learn from how long a step took."""
        if duration_s <= 0.0:
            return
        counts = (1, num_interactive, num_batch, num_more_tokens)
        if not self._costs_s:
            self._begin(counts, duration_s)
        # Written out for the four parts: this runs in every step.
        costs, covariance = self._costs_s, self._covariance
        fixed, interactive, batch, more = [cost * count for cost, count in zip(costs, counts, strict=True)]
        predicted = fixed + interactive + batch + more
        # The derivatives of the logarithm of the prediction are the parts' shares of it. First the covariance of each
        # part with the prediction, then the prediction's own variance.
        shared = [(a * fixed + b * interactive + c * batch + d * more) / predicted for a, b, c, d in covariance]
        of_fixed, of_interactive, of_batch, of_more = shared
        uncertainty = (of_fixed * fixed + of_interactive * interactive + of_batch * batch + of_more * more) / predicted
        largest = max(_LARGEST_ERROR, _LARGEST_DEVIATION * math.sqrt(uncertainty + _NOISE**2))
        error = math.log(duration_s / predicted)
        if abs(error) > largest:
            self._note_surprise(counts, is_longer=error > 0.0)
            error = math.copysign(largest, error)
        else:
            self._num_surprises = 0
        # Derivatives say little about far away: after a large error it is not as sure as they say.
        variance = uncertainty + _NOISE**2 + min((error / 2) ** 2, uncertainty)
        gains = [value / variance for value in shared]
        self._costs_s = [cost * math.exp(gain * error) for cost, gain in zip(costs, gains, strict=True)]
        rows = zip(covariance, gains, strict=True)
        self._covariance = [
            [a - gain * of_fixed, b - gain * of_interactive, c - gain * of_batch, d - gain * of_more]
            for (a, b, c, d), gain in rows
        ]
        self._drift()

    def _note_surprise(self, counts: tuple[int, ...], *, is_longer: bool) -> None:
        """Count a step that errs by too much; after enough of them its parts are as uncertain as at first."""
        before, step = self._num_surprises, 1 if is_longer else -1
        self._num_surprises = before + step if before * step > 0 else step
        if abs(self._num_surprises) < _SURPRISES:
            return
        self._num_surprises = 0
        for part, row in enumerate(self._covariance):
            for other in range(len(row)):
                if counts[part] or counts[other]:
                    row[other] = _FIRST_DEVIATION**2 if part == other else 0.0

    def _begin(self, counts: tuple[int, ...], duration_s: float) -> None:
        scale = duration_s / sum([weight * count for weight, count in zip(_FIRST_WEIGHTS, counts, strict=True)])
        self._costs_s = [weight * scale for weight in _FIRST_WEIGHTS]
        size = range(len(_FIRST_WEIGHTS))
        self._covariance = [[_FIRST_DEVIATION**2 if i == j else 0.0 for j in size] for i in size]

    def _drift(self) -> None:
        for part, row in enumerate(self._covariance):
            row[part] += _DRIFT**2
            if row[part] > _FIRST_DEVIATION**2:
                # The same factor for row and column: it stays a covariance.
                factor = _FIRST_DEVIATION / math.sqrt(row[part])
                for other, others in enumerate(self._covariance):
                    row[other] *= factor
                    others[part] *= factor


def _kind(plan: ScheduledStep, num_drafted: int) -> tuple[int, int, int]:
    """Return the interactive and batch sequences of a step, and the tokens beyond the first of each."""
    num_batch, num_sequences = plan.num_batch, len(plan.scheduled)
    return num_sequences - num_batch, num_batch, plan.num_tokens - num_sequences + num_drafted


class DeviceTime:
    """Writes the records of sequences. Used by the scheduler as steps land.

    A sequence pays for its tokens what the model expects of them: an equal part of what a step takes whatever is in it,
    the cost of a sequence of its lane, and that of each token beyond its first, drafts included. The parts are scaled
    to the time that the step took, so they add up to it. What a step computes for sequences that have ended meanwhile
    is paid by the others; without others, and where it encodes images alone, by those of the next step. So all shares
    add up to the time of all steps.
    """

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._payers: list[bool] | None = None
        self._unpaid_s = 0.0

    def find_payers(self, step: ScheduledStep) -> None:
        """Note who pays for a step, before its outcome is applied, which ends sequences."""
        finished = SequenceStatus.FINISHED
        payers = [
            item.sequence.status is not finished and not item.sequence.record.is_closed for item in step.scheduled
        ]
        self._payers = None if all(payers) else payers

    def share(self, step: ScheduledStep, result: StepResult, duration_s: float, landed_at: float) -> None:
        """Share out the step of which the payers were found last."""
        items, payers = step.scheduled, self._payers
        if not items or (payers is not None and not any(payers)):
            self._unpaid_s += duration_s
            return
        began_at = landed_at - duration_s
        duration_s += self._unpaid_s
        self._unpaid_s = 0.0
        num_items, num_decodes = len(items), step.num_decodes
        has_one_lane = step.num_batch in (0, num_items)
        if payers is None and num_decodes == num_items and has_one_lane and not step.plan.num_drafts:
            # The usual step: nothing but decodes, which cost the same.
            part = duration_s / num_items
            for item in items:
                item.sequence.record.device_s += part
            return
        num_payers = num_items if payers is None else sum(payers)
        shares = self._shares(items, result.sampled, payers, num_payers, duration_s)
        for place, (item, sampled, share_s) in enumerate(zip(items, result.sampled, shares, strict=True)):
            if share_s is None:
                continue
            record = item.sequence.record
            record.device_s += share_s
            if place >= num_decodes:
                record.prefill(item.start, item.num_tokens, share_s, began_at, landed_at)
            elif sampled.num_drafted:
                record.rejected_s += self._rejected(item, sampled, share_s, num_payers)

    def _shares(
        self,
        items: Values[ScheduledSequence],
        sampled: Values[SampledTokens],
        payers: Values[bool] | None,
        num_payers: int,
        duration_s: float,
    ) -> list[float | None]:
        """Return the share of each item in seconds; None for one that does not pay."""
        weights = [
            self._weight(item, outcome.num_drafted, num_payers) if payers is None or payers[place] else None
            for place, (item, outcome) in enumerate(zip(items, sampled, strict=True))
        ]
        total = sum([weight for weight in weights if weight is not None])
        return [None if weight is None else duration_s * weight / total for weight in weights]

    def _weight(self, item: ScheduledSequence, num_drafted: int, num_payers: int) -> float:
        fixed, interactive, batch, token = self._model.costs_s
        own = interactive if item.sequence.lane == "interactive" else batch
        return fixed / num_payers + own + token * (item.num_tokens - 1 + num_drafted)

    def _rejected(self, item: ScheduledSequence, sampled: SampledTokens, share_s: float, num_payers: int) -> float:
        num_rejected = sampled.num_drafted - sampled.num_accepted
        return share_s * self._model.token_s * num_rejected / self._weight(item, sampled.num_drafted, num_payers)
