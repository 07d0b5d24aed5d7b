"""Detects after an absence of NATS when all frames of a worker have arrived; frames missing by then were lost.

Frames published while the gateway was not connected are lost, and not repeated. A worker's messages arrive in the
order in which it sent them: no frame of a step arrives after a heartbeat that counts this step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.messages import Heartbeat

# Steps in which each running stream gets a token, unless its worker has put it back.
NUM_STEPS = 4
# A heartbeat may overtake the frame of the step that it counts by a turn of its worker's event loop.
MARGIN_S = 0.1


@dataclass(slots=True)
class Resumption:
    """Progress shown by one worker's heartbeats since NATS was away. Times are loop time.

    Attributes:
        first_step: Step counter of the first of them; None before it.
        streams_reported_at: When they first showed that a frame has come for each running stream, if any will.
        prompts_reported_at: The same for requests whose prompt was being computed.
    """

    first_step: int | None = None
    streams_reported_at: float = math.inf
    prompts_reported_at: float = math.inf

    def note_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Take in a heartbeat of the worker."""
        if self.first_step is None:
            self.first_step = heartbeat.step
            return
        is_idle = heartbeat.running == 0 and heartbeat.waiting == 0
        has_stepped = heartbeat.step - self.first_step >= NUM_STEPS
        if is_idle or has_stepped:
            self.streams_reported_at = min(self.streams_reported_at, now)
        if is_idle or (has_stepped and heartbeat.waiting == 0 and heartbeat.waiting_tokens == 0):
            self.prompts_reported_at = min(self.prompts_reported_at, now)

    def is_complete(self, now: float, *, has_output: bool) -> bool:
        """Whether news of a request that the worker held before has come, if any will; `has_output` of its tokens."""
        reported_at = self.streams_reported_at if has_output else self.prompts_reported_at
        return now - reported_at > MARGIN_S
