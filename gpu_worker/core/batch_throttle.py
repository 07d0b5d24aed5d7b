"""How much batch work the next step may hold, so that it costs people next to nothing and fills the machine otherwise.

Three situations, told apart at every step:

- The step has interactive sequences. Batch work may make it longer by `slowdown`, a share of what the step would take
  without (predicted by `StepTimeModel`). On a GPU that is many sequences. On a CPU it is often none: then one step in
  `_LONG_STEP_INTERVAL` may be `_LONG_STEP` times as long, so that batch work goes on. All these together are too small
  a share of the steps and of the time to move a 99th percentile. Where every step has batch work, one in
  `_PROBE_INTERVAL` goes without, so that what people's steps take alone stays known.
- It has none, but there were some in the last `_PEOPLE_MEMORY_S`: people come in bursts. Who comes during a batch step
  waits for its end, so steps are short beside what a first token takes, and rare at first: `t` seconds after people,
  batch work computes for the share `t / _PEOPLE_MEMORY_S` of the time. A client that asks again soon finds the engine
  and the cores free.
- Nobody is there. A step is as long as is needed for `_FULL_SPEED` of the highest throughput: with a fixed part `f`, a
  step of length `f / (1 - share)` reaches that share. The first person to come waits for no more than that.

Owns what it remembers of people and of past plans; the planner writes it, at every plan. While there is no batch work,
nothing is asked of it.
"""

from __future__ import annotations

import math

from gpu_worker.core.step import StepPlan
from gpu_worker.core.step_time import StepTimeModel

_LONG_STEP_INTERVAL = 1000
_LONG_STEP = 3.0
"""How much longer the long step may be, in steps without batch work, …"""

_LONG_STEP_S = 0.05
"""… and in seconds."""

_PROBE_INTERVAL = 64
_PEOPLE_MEMORY_S = 10.0
_LONGEST_PAUSE_S = 1.0
"""Gateways take a worker that has work and makes no step for long for a dead one."""

_WAIT_SHARE = 0.2
"""Length of a batch step over the time to a first token: half of it is waited for on average."""

_FULL_SPEED = 0.95
_LEAST_FULL_STEP = 4.0
"""Length of a step at full speed over that of one sequence, at least."""

_FIRST_TOKEN_WEIGHT = 0.1

_UNLIMITED_SLOWDOWN = 1.0
"""From this slowdown on, batch work is not held back at all: it may double the steps of people."""

MIN_CHUNK_TOKENS = 16
"""No smaller chunk of a batch prompt is computed, except for its last."""


class BatchAllowance:
    """Seconds that batch work may add to one step; the planner takes sequences and tokens out of it.

    Attributes:
        is_throttled: People are the reason why it is limited.
    """

    __slots__ = ("_is_first_free", "_seconds", "_sequence_s", "_token_s", "is_throttled")

    def __init__(
        self, seconds: float, model: StepTimeModel, *, is_first_free: bool = False, is_throttled: bool = False
    ) -> None:
        """Allow `seconds`, infinity for any amount; `is_first_free` allows a sequence whatever it takes."""
        self._seconds = seconds
        self._sequence_s, self._token_s = (model.batch_sequence_s, model.token_s) if model.is_known else (0.0, 0.0)
        self._is_first_free = is_first_free
        self.is_throttled = is_throttled

    @property
    def is_spent(self) -> bool:
        """Say whether not even one more sequence may be in the step."""
        return not self._is_first_free and self._seconds < self._sequence_s

    @property
    def has_room(self) -> bool:
        """Say whether a prompt may begin."""
        return self._is_first_free or self._seconds >= self._sequence_s + (MIN_CHUNK_TOKENS - 1) * self._token_s

    def take_decodes(self, num_wanted: int) -> int:
        """Return how many of so many decodes the step may hold."""
        if num_wanted <= 0:
            return 0
        count = num_wanted
        if self._seconds < num_wanted * self._sequence_s:
            count = max(int(self._seconds / self._sequence_s), int(self._is_first_free))
        self._take(count * self._sequence_s)
        return count

    def take_chunk(self, num_wanted: int) -> int:
        """Return how many tokens of a prompt of one more sequence the step may hold; none when too few are left."""
        count = num_wanted
        seconds = self._seconds - self._sequence_s
        if seconds < (num_wanted - 1) * self._token_s:
            count = 1 + int(seconds / self._token_s) if seconds > 0 else 0
            least = min(num_wanted, MIN_CHUNK_TOKENS)
            if count < least:
                count = least if self._is_first_free else 0
        if count:
            self._take(self._sequence_s + (count - 1) * self._token_s)
        return count

    def take_whole(self, num_tokens: int) -> bool:
        """Say whether the step may hold a whole prompt of one more sequence."""
        seconds = self._sequence_s + (num_tokens - 1) * self._token_s
        if seconds > self._seconds and not self._is_first_free:
            return False
        self._take(seconds)
        return True

    def _take(self, seconds: float) -> None:
        self._seconds = max(0.0, self._seconds - seconds)
        self._is_first_free = False


class BatchThrottle:
    """Makes the allowance of every step."""

    def __init__(self, model: StepTimeModel, slowdown: float) -> None:
        """Let batch work make the steps of people longer by the share `slowdown`."""
        self._model = model
        self._slowdown = slowdown
        self._last_people = -math.inf
        self._last_landed = -math.inf
        self._batch_s = 0.0
        self._first_token_s = 0.0
        self._num_steps_without = 0
        self._num_steps_with = 0
        self._is_quiet = True
        self._is_unlimited = slowdown >= _UNLIMITED_SLOWDOWN

    def allowance(self, now: float, num_interactive: int, num_more_tokens: int) -> BatchAllowance:
        """Return what the next step may hold beside the work of people.

        Args:
            now: Monotonic seconds.
            num_interactive: Interactive sequences in the step.
            num_more_tokens: Their tokens in the step, beyond the first of each.
        """
        model = self._model
        if not model.is_known or self._is_unlimited:
            return BatchAllowance(math.inf, model)
        if num_interactive:
            return BatchAllowance(self._beside_people_s(num_interactive, num_more_tokens), model, is_throttled=True)
        if now - self._last_people > _PEOPLE_MEMORY_S:
            return BatchAllowance(self._full_speed_s, model, is_first_free=True)
        first_token_s = self._first_token_s or model.predict(1, 0, 0)
        seconds = _WAIT_SHARE * first_token_s - model.fixed_s
        return BatchAllowance(seconds, model, is_first_free=True, is_throttled=True)

    def planned(self, now: float, num_interactive: int, num_more_tokens: int, num_batch: int) -> None:
        """Record a step that was planned at `now` with so many sequences of each lane; see `allowance`."""
        if not num_interactive:
            self._is_quiet = now - self._last_people > _PEOPLE_MEMORY_S
            return
        self._last_people, self._is_quiet = now, False
        if num_batch:
            self._num_steps_with += 1
            self._num_steps_without = 0
        else:
            self._num_steps_with = 0
            self._num_steps_without += 1
        if num_more_tokens and self._model.is_known:
            alone_s = self._model.predict(num_interactive, 0, num_more_tokens)
            weight = _FIRST_TOKEN_WEIGHT if self._first_token_s else 1.0
            self._first_token_s += weight * (alone_s - self._first_token_s)

    def landed(self, plan: StepPlan, duration_s: float, now: float) -> None:
        """Record a step of `duration_s` that has landed at `now`, in monotonic seconds."""
        if len(plan.scheduled) > plan.num_batch:
            self._last_landed = now
            self._batch_s = 0.0
        else:
            self._batch_s += duration_s

    def pause_s(self, now: float) -> float:
        """Return for how many seconds no step of batch work alone should begin."""
        if self._is_unlimited or now - self._last_landed >= _PEOPLE_MEMORY_S:
            return 0.0
        # A share that grows as t / memory has allowed t² / (2 × memory) seconds after t seconds.
        next_s = self._model.predict(0, 1, 0) if self._model.is_known else 0.0
        wait_s = min(math.sqrt(2 * _PEOPLE_MEMORY_S * (self._batch_s + next_s)), _PEOPLE_MEMORY_S)
        return min(_LONGEST_PAUSE_S, max(0.0, self._last_landed + wait_s - now))

    def max_batch_seqs(self, max_num_seqs: int) -> int:
        """Return how many batch sequences the longest step at present can hold: no more are worth having here."""
        model = self._model
        if not model.is_known or self._is_unlimited:
            return max_num_seqs
        seconds = self._full_speed_s if self._is_quiet else self._long_step_s(model.predict(1, 0, 0))
        return max(1, min(max_num_seqs, math.ceil(seconds / model.batch_sequence_s)))

    @property
    def _full_speed_s(self) -> float:
        # Steps of one sequence do not tell the fixed part from the other: always try several.
        least_s = _LEAST_FULL_STEP * self._model.predict(0, 1, 0)
        return max(least_s, self._model.fixed_s * (1.0 / (1.0 - _FULL_SPEED) - 1.0))

    def _beside_people_s(self, num_interactive: int, num_more_tokens: int) -> float:
        alone_s = self._model.predict(num_interactive, 0, num_more_tokens)
        if self._num_steps_with >= _PROBE_INTERVAL:
            return 0.0
        # Never a step with a prompt: the first token is what people wait for most.
        if self._num_steps_without >= _LONG_STEP_INTERVAL and not num_more_tokens:
            return self._long_step_s(alone_s)
        return self._slowdown * alone_s

    @staticmethod
    def _long_step_s(alone_s: float) -> float:
        return min(_LONG_STEP * alone_s, max(_LONG_STEP_S, alone_s))
