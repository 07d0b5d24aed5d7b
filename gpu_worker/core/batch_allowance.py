"""How much longer batch work may make one step. The throttle makes an allowance; the planner takes work out of it."""

from __future__ import annotations

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
        """Allow `seconds`, which may be infinite; with `is_first_free` one sequence is allowed whatever it takes."""
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

        None where too few fit.
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
