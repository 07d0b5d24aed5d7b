"""Trials of batch requests whose workers have died: each begins alone, which shows the one that is to blame.

All requests of a dead worker are delivered again. One that lost a worker since its last progress is a suspect: it waits
here until everything else in the batch lane has produced output, and begins while no other suspect does. So a request
that kills workers fails its own trials. Suspects with the fewest losses are tried first.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_worker.consumer.held_request import HeldRequest, HeldRequests

HARMLESS_TOKENS = 32
"""Tokens after which a request is no longer a suspect. GPUs often report faults some steps after their cause."""

SETTLE_S = 0.5
"""Requests that were lost together come back together: the first trial waits until none has come for this long."""

MAX_WAIT_S = 5.0
"""How long a trial waits for requests that began before it. Beside people some of them would need minutes to begin."""


@dataclass(eq=False)
class BatchTrials:
    """Owns which suspects wait and which one is tried.

    `make_way` is called when a trial has waited for long enough: what has produced nothing yet is to go.

    Attributes:
        num_coming: Requests that were delivered again, of which it is being looked up whether they are suspects.
    """

    _held: HeldRequests
    _begin: Callable[[HeldRequest], None]
    _make_way: Callable[[], None]
    _waiting: list[HeldRequest] = field(default_factory=list)
    _tried: HeldRequest | None = None
    _settled_at: float = -math.inf
    num_coming: int = 0

    @property
    def is_active(self) -> bool:
        """Whether there may be suspects here: a request that begins now could be mistaken for one of them."""
        return bool(self._waiting) or self._tried is not None or self.num_coming > 0

    def add(self, held: HeldRequest) -> None:
        """Let a suspect wait for its trial."""
        held.probation = 1 if held.num_failed == 1 else HARMLESS_TOKENS
        held.is_parked = True
        self._waiting.append(held)
        self._settled_at = time.monotonic() + SETTLE_S

    def put_off(self, held: HeldRequest) -> None:
        """Let a suspect wait again whose trial could not begin."""
        self._tried, held.is_charged = None, False
        self.add(held)

    def note_output(self, held: HeldRequest, num_tokens: int) -> bool:
        """Take note that a suspect has produced tokens; return whether it has just shown that it is harmless."""
        held.probation = max(0, held.probation - num_tokens)
        if held is self._tried and not held.probation:
            self._tried = None
            self.review()
        if held.num_output_tokens - held.num_earlier_tokens < HARMLESS_TOKENS:
            return False
        held.num_failed, held.is_charged = 0, False
        return True

    def forget(self, held: HeldRequest) -> None:
        """Take note that a request is not held any more."""
        held.is_charged = False
        if held.is_parked:
            self._waiting.remove(held)
            held.is_parked = False
        elif held is self._tried:
            self._tried = None
            # Not in this call: if many are refused at once, the calls would nest as deeply.
            asyncio.get_running_loop().call_soon(self.review)

    def review(self) -> None:
        """Begin the next trial if it is time. Called several times a second, too."""
        if self._tried is not None or self.num_coming or not self._waiting:
            return
        now = time.monotonic()
        if now < self._settled_at or self._held.has_suspect:
            return
        if any(held.request.lane == "batch" and not held.is_parked and held.is_without_output for held in self._held):
            if now >= self._settled_at + MAX_WAIT_S:
                self._make_way()
            return
        # Of equals the first that came.
        self._tried = min(self._waiting, key=lambda held: held.num_failed)
        self._waiting.remove(self._tried)
        self._tried.is_parked, self._tried.is_charged = False, True
        self._begin(self._tried)
