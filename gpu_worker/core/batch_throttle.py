"""How much batch work the next step may hold: next to none that interactive sequences notice, else a full machine.

- A step with interactive sequences may get longer by the share `slowdown`. Where one batch sequence takes longer than
  that, as on a CPU, one step in `_STARVED_INTERVAL` may take `_LONG_STEP` times as long: batch work goes on, and is
  measured. Such steps are too few, and too short, to move a 99th percentile.
- While more interactive requests are likely, `t` seconds after the last, batch steps are short, and get the share
  `t / _INTERACTIVE_MEMORY_S` of the time. That lasts for `_GAPS` times the longest of the latest gaps.
- Later a step is as long as it takes to reach `_FULL_SPEED` of the highest throughput: with a fixed part `f`, a step of
  length `f / (1 - share)` reaches that share. The first interactive request waits for one such step at most.

The throttle makes a `BatchAllowance`; the planner takes work out of it.
"""

from __future__ import annotations

import math

from gpu_worker.core.step import ScheduledStep
from gpu_worker.core.step_time import StepTimeModel

MIN_CHUNK_TOKENS = 16
"""No smaller chunk of a batch prompt is computed, except for its last, where nothing else is in the step. Beside people
a smaller one may be all that ever fits."""


class BatchAllowance:
    """Batch work may add `left_s` seconds to the step. The model predicts what a sequence or a token adds."""

    __slots__ = ("_is_first_free", "_min_chunk_tokens", "_sequence_s", "_token_s", "is_throttled", "left_s")

    def __init__(
        self, seconds: float, model: StepTimeModel, *, is_first_free: bool = False, is_throttled: bool = False
    ) -> None:
        """Allow `seconds`, which may be infinite; `is_first_free` admits one sequence at any cost."""
        self.left_s = seconds
        self._sequence_s, self._token_s = (model.batch_sequence_s, model.token_s) if model.is_known else (0.0, 0.0)
        self._is_first_free = is_first_free
        self.is_throttled = is_throttled
        self._min_chunk_tokens = 1 if is_throttled and not is_first_free else MIN_CHUNK_TOKENS

    @property
    def is_spent(self) -> bool:
        """Return whether no further sequence may be in the step."""
        return not self._is_first_free and self.left_s < self._sequence_s

    @property
    def has_room(self) -> bool:
        """Return whether a prompt may begin."""
        return self._is_first_free or self.left_s >= self._sequence_s + (self._min_chunk_tokens - 1) * self._token_s

    def take_decodes(self, num_wanted: int) -> int:
        """Return how many of `num_wanted` decodes the step may hold, and take their time."""
        if num_wanted <= 0:
            return 0
        count = num_wanted
        if self.left_s < num_wanted * self._sequence_s:
            count = max(int(self.left_s / self._sequence_s), int(self._is_first_free))
        self._take(count * self._sequence_s)
        return count

    def take_chunk(self, num_wanted: int) -> int:
        """Return how many of `num_wanted` tokens of one more sequence's prompt the step may hold, and take their time.

        0 where too few fit.
        """
        count = num_wanted
        seconds = self.left_s - self._sequence_s
        if seconds < (num_wanted - 1) * self._token_s:
            count = 1 + int(seconds / self._token_s) if seconds > 0 else 0
            least = min(num_wanted, self._min_chunk_tokens)
            if count < least:
                count = least if self._is_first_free else 0
        if count:
            self._take(self._sequence_s + (count - 1) * self._token_s)
        return count

    def take_whole(self, num_tokens: int) -> bool:
        """Return whether the step may hold a whole prompt of one more sequence, and take its time if it may."""
        seconds = self._sequence_s + (num_tokens - 1) * self._token_s
        if seconds > self.left_s and not self._is_first_free:
            return False
        self._take(seconds)
        return True

    def _take(self, seconds: float) -> None:
        self.left_s = max(0.0, self.left_s - seconds)
        self._is_first_free = False


_LONG_STEP_INTERVAL = 1000
"""One step in this many beside interactive sequences may be long, if batch work has room in the others too …"""

_STARVED_INTERVAL = 250
"""… and where a batch sequence takes longer than the slowdown allows."""

_ALONE_STEPS = 1000
"""After this many steps with one interactive sequence, no other prompt or request is likely to meet a long step …"""

_ALONE_INTERVAL = 150
_ALONE_LONG_STEP = 6.0
"""… so that one step of this many may take this many times as long."""

_FIRST_LONG_STEP = 8
"""Until the model is sure of what batch work takes: steps before the first long one, doubled after each."""

_TELLING = 0.15
_SURPRISE = 0.5
"""A step with people tells whether the estimates are right where batch work is to make it longer by this share; they
are much too high where it makes it longer by less than `_SURPRISE` of that."""

_TRIAL_INTERVAL = 200
"""Steps between long ones while a batch sequence is on trial."""

_LONG_STEP = 3.0
"""Length of the long step at most, in steps without batch work …"""

_LONG_STEP_S = 0.05
"""… and in seconds, where that is less."""

_PROBE_INTERVAL = 64
"""One step in this many goes without batch work, to measure what interactive sequences take alone."""

_INTERACTIVE_MEMORY_S = 10.0
_LEAST_QUIET_S = 0.25
_GAPS = 2.5
"""Interactive users have left after this multiple of their longest recent gap, within the two limits above."""

_LEAST_GAP_S = 0.01
"""Shorter gaps are those between the steps of one answer."""

_GAP_MEMORY = 0.97
"""Factor by which each further gap shrinks the longest one."""

_LONGEST_PAUSE_S = 1.0
"""Longest pause: a gateway considers a worker dead if it has work but ends no step for long."""

_WAIT_SHARE = 0.2
"""Length of a batch step as a share of the time to a first token. On average a request waits for half of it."""

_FULL_SPEED = 0.95
"""Share of the highest throughput that batch work reaches when it is alone."""

_LEAST_FULL_STEP = 4.0
"""Length of a step at full speed, at least, in steps of one sequence."""

_FIRST_TOKEN_WEIGHT = 0.1
"""Weight of the latest prompt in the moving average of the time to a first token."""

_UNLIMITED_SLOWDOWN = 1.0
"""From this slowdown on, where steps may take twice as long, batch work is not held back at all."""


class BatchThrottle:
    """Makes the allowance of every step that may hold batch work."""

    def __init__(self, model: StepTimeModel, slowdown: float) -> None:
        self._model = model
        self._slowdown = slowdown
        self._last_interactive = -math.inf
        self._last_landed = -math.inf
        self._batch_s = 0.0
        self._first_token_s = 0.0
        self._num_steps_with = 0
        self._num_steps_since_long = 0
        self._num_steps_alone = 0
        self._learning_interval = _FIRST_LONG_STEP
        self._left_over = BatchAllowance(0.0, model)
        self._is_long = False
        self._is_surprised = False
        self._longest_gap_s = 0.0
        self._is_quiet = True
        self._is_unlimited = slowdown >= _UNLIMITED_SLOWDOWN

    def allowance(
        self, now: float, num_interactive: int, num_more_tokens: int, *, is_trial: bool = False
    ) -> BatchAllowance:
        """Return what the next step may hold beside its interactive sequences.

        These have `num_more_tokens` tokens in the step beyond the first of each.
        """
        model = self._model
        if not model.is_known or self._is_unlimited:
            return BatchAllowance(math.inf, model)
        if num_interactive:
            seconds = self._beside_interactive_s(num_interactive, num_more_tokens, is_trial)
            self._left_over = BatchAllowance(seconds, model, is_throttled=True)
            return self._left_over
        if now - self._last_interactive > self._quiet_s:
            return BatchAllowance(self._full_speed_s, model, is_first_free=True)
        first_token_s = self._first_token_s or model.predict(1, 0, 0)
        seconds = _WAIT_SHARE * first_token_s - model.fixed_s
        return BatchAllowance(seconds, model, is_first_free=True, is_throttled=True)

    def planned(self, now: float, num_interactive: int, num_more_tokens: int, num_batch: int) -> None:
        """Record a step that was planned at `now`, by the number of sequences of each lane; see `allowance`."""
        if not num_interactive:
            self._is_quiet = now - self._last_interactive > self._quiet_s
            return
        gap_s = now - self._last_landed
        if _LEAST_GAP_S < gap_s < _INTERACTIVE_MEMORY_S:
            self._longest_gap_s = max(gap_s, _GAP_MEMORY * self._longest_gap_s)
        self._last_interactive, self._is_quiet = now, False
        self._num_steps_with = self._num_steps_with + 1 if num_batch else 0
        self._num_steps_since_long += 1
        self._num_steps_alone = self._num_steps_alone + 1 if num_interactive == 1 else 0
        if num_batch and self._is_long:
            self._num_steps_since_long = 0
            self._learning_interval = min(2 * self._learning_interval, _LONG_STEP_INTERVAL)
        if num_more_tokens and self._model.is_known:
            alone_s = self._model.predict(num_interactive, 0, num_more_tokens)
            weight = _FIRST_TOKEN_WEIGHT if self._first_token_s else 1.0
            self._first_token_s += weight * (alone_s - self._first_token_s)

    def landed(self, plan: ScheduledStep, duration_s: float, now: float) -> None:
        """Record a step of `duration_s` that has landed at `now`, in monotonic seconds."""
        if len(plan.scheduled) > plan.num_batch:
            self._last_landed = now
            self._batch_s = 0.0
            if plan.num_batch and self._model.is_known:
                self._note_surprise(plan, duration_s)
        else:
            self._batch_s += duration_s

    def pause_s(self, now: float) -> float:
        """Return for how many seconds no step of batch work alone should begin."""
        if self._is_unlimited or now - self._last_landed >= self._quiet_s:
            return 0.0
        # The share t / memory of the time adds up to t² / (2 × memory) seconds after t seconds: wait until that covers
        # what batch work has taken and its next step.
        next_s = self._model.predict(0, 1, 0) if self._model.is_known else 0.0
        wait_s = min(math.sqrt(2 * _INTERACTIVE_MEMORY_S * (self._batch_s + next_s)), self._quiet_s)
        return min(_LONGEST_PAUSE_S, max(0.0, self._last_landed + wait_s - now))

    def max_batch_seqs(self, max_num_seqs: int) -> int:
        """Return how many batch sequences the longest step of the present situation holds: more would only wait."""
        model = self._model
        if not model.is_known or self._is_unlimited:
            return max_num_seqs
        length = _ALONE_LONG_STEP if self._is_alone and self._is_starved(1) else _LONG_STEP
        seconds = self._full_speed_s if self._is_quiet else self._long_step_s(model.predict(1, 0, 0), length)
        return max(1, min(max_num_seqs, math.ceil(seconds / model.batch_sequence_s)))

    @property
    def _quiet_s(self) -> float:
        """Seconds without people after which they are taken to have left."""
        return min(_INTERACTIVE_MEMORY_S, max(_LEAST_QUIET_S, _GAPS * self._longest_gap_s))

    @property
    def _is_alone(self) -> bool:
        """Whether one person has had the machine for long, and such long steps are within the slowdown on average."""
        return self._num_steps_alone >= _ALONE_STEPS and self._slowdown * _ALONE_INTERVAL >= _ALONE_LONG_STEP - 1.0

    @property
    def _is_learning(self) -> bool:
        return self._is_surprised or not self._model.is_sure_of_batch

    def _note_surprise(self, plan: ScheduledStep, duration_s: float) -> None:
        """Look whether a step that was to take long for its batch work took much less: there is more to learn soon."""
        num_more = plan.num_tokens - len(plan.scheduled)
        num_people = len(plan.scheduled) - plan.num_batch
        alone_s = self._model.predict(num_people, 0, 0)
        expected_s = self._model.predict(num_people, plan.num_batch, num_more) - alone_s
        if expected_s < _TELLING * alone_s:
            return
        self._is_surprised = duration_s - alone_s < _SURPRISE * expected_s
        if self._is_surprised:
            self._learning_interval = _FIRST_LONG_STEP

    @property
    def _full_speed_s(self) -> float:
        # Always try several sequences: steps of one cannot tell its part of the time from the fixed part.
        least_s = _LEAST_FULL_STEP * self._model.predict(0, 1, 0)
        return max(least_s, self._model.fixed_s * (1.0 / (1.0 - _FULL_SPEED) - 1.0))

    def _beside_interactive_s(self, num_interactive: int, num_more_tokens: int, is_trial: bool) -> float:
        alone_s = self._model.predict(num_interactive, 0, num_more_tokens)
        interval, length = self._interval_and_length(num_interactive, is_trial)
        # Never a step that computes a prompt: its client waits for a first token.
        self._is_long = self._num_steps_since_long >= interval and not num_more_tokens
        if self._is_long:
            return self._long_step_s(alone_s, length)
        if self._num_steps_with >= _PROBE_INTERVAL:
            return 0.0
        seconds = self._slowdown * alone_s
        if num_more_tokens:
            return seconds
        return seconds + min(self._left_over.left_s, self._model.batch_sequence_s, seconds)

    def _interval_and_length(self, num_interactive: int, is_trial: bool) -> tuple[int, float]:
        """Return after how many steps a long one comes, and how many times as long it may be."""
        interval, length = _TRIAL_INTERVAL if is_trial else _LONG_STEP_INTERVAL, _LONG_STEP
        if self._is_starved(num_interactive):
            interval = min(interval, _STARVED_INTERVAL)
            if self._is_alone:
                interval, length = min(interval, _ALONE_INTERVAL), _ALONE_LONG_STEP
        if self._is_learning:
            interval = min(interval, self._learning_interval)
        return interval, length

    def _is_starved(self, num_interactive: int) -> bool:
        """Whether not even every second step beside these sequences has room for a batch sequence."""
        model = self._model
        return model.batch_sequence_s > 2 * self._slowdown * model.predict(num_interactive, 0, 0)

    @staticmethod
    def _long_step_s(alone_s: float, length: float) -> float:
        return min(length * alone_s, max(_LONG_STEP_S, alone_s))
