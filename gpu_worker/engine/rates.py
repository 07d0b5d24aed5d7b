"""How fast the engine works, measured over its own steps; idle time does not count."""

from __future__ import annotations

import math

_MEMORY_S = 2.0
"""Time constant: busy seconds after which a measurement has lost most of its weight."""


class Rate:
    """Units per busy second, averaged with exponential forgetting; 0 while unknown."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    @property
    def value(self) -> float:
        """Units per second."""
        return self._units / self._seconds if self._seconds > 0 else 0.0

    def observe(self, units: float, duration_s: float) -> None:
        """Add what one step did."""
        keep = math.exp(-duration_s / _MEMORY_S)
        self._units = self._units * keep + units
        self._seconds = self._seconds * keep + duration_s


class StepRates:
    """Rates as heartbeats report them; each is 0 until it was measured.

    Attributes:
        prefill: Prompt tokens per second that the engine can do, next to the decodes that it was doing.
        decode: Generated tokens per second of a batch as full as it can be.
    """

    def __init__(self) -> None:
        self.prefill, self.decode = Rate(), Rate()

    def observe(
        self, *, num_prefilled: int, num_generated: int, is_full: bool, is_batch_full: bool, duration_s: float
    ) -> None:
        """Add one step.

        Args:
            num_prefilled: Prompt tokens computed.
            num_generated: Tokens sampled.
            is_full: The step had as many tokens as a step may have. A step that ran out of prompts only shows a lower
                bound of the prefill rate: it may raise the estimate, never lower it, and is not an estimate by itself.
            is_batch_full: No more sequences could run. A smaller batch shows a lower bound of the decode rate likewise.
            duration_s: Wall time of the step.
        """
        if duration_s <= 0:
            return
        if num_prefilled and (is_full or 0 < self.prefill.value < num_prefilled / duration_s):
            self.prefill.observe(num_prefilled, duration_s)
        if num_generated and (is_batch_full or 0 < self.decode.value < num_generated / duration_s):
            self.decode.observe(num_generated, duration_s)
