"""How long a tenant's grammars may hold up everybody's steps: masks are computed between them, one after another.

A limit for each sequence does not do: a request has up to 128 of them, and a tenant many requests.
"""

from __future__ import annotations

import time

USUAL_S = 0.0001
"""Shorter ones cost nothing. A few microseconds are usual, some 40 with 128,000 tokens."""

SHARE = 0.2
"""The time that a tenant's grammars may compute beyond that, as a share of all time."""

TOTAL_SHARE = 0.4
"""The same of all tenants together: beyond that, none of them gets anything back."""

BURST_S = 0.5
"""Seconds that they may compute at once, as many new grammars do."""

MAX_CHARGE_S = 0.1
"""A mask counts as this much at most, because a virtual machine counts its pauses as work."""


class GrammarBudget:
    """The seconds that one tenant's grammars may still compute; below zero once they took more. Used on any thread."""

    __slots__ = ("_at", "_is_watched", "_left_s", "_share", "_total")

    def __init__(self, total: GrammarBudget | None = None, share: float = SHARE) -> None:
        """Begin with a burst; `total` is that of all tenants."""
        self._total, self._share = total, share
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
        charge = min(seconds, MAX_CHARGE_S) - USUAL_S
        if self._total is not None:
            self._total._take(charge)
        self._take(charge)
        return self._left_s >= 0

    @property
    def is_overdrawn(self) -> bool:
        """Whether the debt is so large that nothing more may be computed, however fast it is."""
        if self._left_s >= -BURST_S:
            return False
        self._refill()
        return self._left_s < -BURST_S

    def _take(self, seconds: float) -> None:
        self._refill()
        self._left_s -= seconds

    def _refill(self) -> None:
        now, total = time.monotonic(), self._total
        passed, self._at = now - self._at, now
        if total is not None:
            total._refill()
            if total._left_s < 0:
                return
        self._left_s = min(BURST_S, self._left_s + self._share * passed)
