"""How long a tenant's grammars may hold up everybody's steps: masks are computed between them, one after another.

A limit for each sequence does not do: a request has up to 128 of them, and a tenant many requests.
"""

from __future__ import annotations

import time

USUAL_S = 0.0001
"""Shorter ones cost nothing. A few microseconds are usual, some 40 with 128,000 tokens."""

SHARE = 0.2
"""The time that a tenant's grammars may compute beyond that, as a share of all time."""

BURST_S = 0.5
"""Seconds that they may compute at once, as many new grammars do."""

MAX_CHARGE_S = 0.1
"""A mask counts as this much at most, because a virtual machine counts its pauses as work."""


class GrammarBudget:
    """The seconds that one tenant's grammars may still compute; below zero once they took more. Used on any thread."""

    __slots__ = ("_at", "_is_watched", "_left_s")

    def __init__(self) -> None:
        self._left_s = BURST_S
        self._at = time.monotonic()
        self._is_watched = False

    def now(self) -> float:
        """Return the time of a clock in seconds, as `spend` takes it.

        Time passes too while other programs have the processor, which is no fault of a grammar. The thread's own time
        costs about as much as a usual mask, so it is read once something has taken long.
        """
        return time.thread_time() if self._is_watched else time.perf_counter()

    def spend(self, since: float) -> bool:
        """Charge the time since `now` gave one; return False where that was long, and the budget is used up."""
        was_watched, seconds = self._is_watched, self.now() - since
        if seconds <= USUAL_S:
            return True
        self._is_watched = True
        if not was_watched:
            return True
        self._refill()
        self._left_s -= min(seconds, MAX_CHARGE_S) - USUAL_S
        return self._left_s >= 0

    @property
    def is_overdrawn(self) -> bool:
        """Whether the debt is so large that nothing more may be computed, however fast it is."""
        if self._left_s >= -BURST_S:
            return False
        self._refill()
        return self._left_s < -BURST_S

    def _refill(self) -> None:
        now = time.monotonic()
        self._left_s = min(BURST_S, self._left_s + SHARE * (now - self._at))
        self._at = now
