"""What the engine's steps did since the start, for metrics. The engine's thread writes it; others may read it."""

from __future__ import annotations

from shared.histogram import Histogram
from shared.worker_metrics import STEP_SECONDS_BOUNDS, STEP_TOKENS_BOUNDS


class StepCounts:
    """Sums over the steps that landed.

    Attributes:
        num_prefilled: Prompt tokens computed.
        num_generated: Tokens sampled.
        step_tokens: Tokens of each step, drafts not counted.
        step_seconds: How long each step took.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self.num_prefilled = 0
        self.num_generated = 0
        self.step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self.step_seconds = Histogram(STEP_SECONDS_BOUNDS)

    def observe(self, num_tokens: int, num_prefilled: int, num_generated: int, duration_s: float) -> None:
        """Add one step."""
        self.num_prefilled += num_prefilled
        self.num_generated += num_generated
        self.step_tokens.observe(num_tokens)
        self.step_seconds.observe(duration_s)
