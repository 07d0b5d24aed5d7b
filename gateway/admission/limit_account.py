"""One key's account at this gateway: its window, its running requests, and what Redis has yet to be told about it.

Written by the rate limiter alone. Redis is told the number of running sequences as a whole, and corrections of tokens
under a number by which they are applied once: whatever is not confirmed is stated again.
"""

from __future__ import annotations

from gateway.admission.hold_times import HoldTimes
from gateway.admission.limit_window import BATCH_S, WINDOW_S, KeyUsage


class KeyAccount:
    """What one gateway knows of one key.

    Attributes:
        usage: The window, and the count of running sequences.
        holds: How long requests run.
        num_pending: Sequences about which Redis is being asked.
        num_calls: Statements under way to Redis.
        version: Of the last statement made.
        is_dirty: Something has changed since then, or Redis did not confirm it.
        is_counted: The key has a limit of sequences at once, so Redis must know how many run.
        stated_at: When the last confirmed statement was made; Unix seconds.
    """

    __slots__ = (
        "_corrections",
        "_sent",
        "holds",
        "is_counted",
        "is_dirty",
        "num_calls",
        "num_pending",
        "stated_at",
        "usage",
        "version",
    )

    def __init__(self) -> None:
        """Begin unused."""
        self.usage = KeyUsage()
        self.holds = HoldTimes()
        self.num_pending = 0
        self.num_calls = 0
        self.version = 0
        self.is_dirty = False
        self.is_counted = False
        self.stated_at = 0.0
        self._corrections: dict[int, int] = {}
        self._sent: tuple[int, dict[int, int]] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost with the account."""
        is_busy = self.num_calls or not self.holds.is_empty or self.usage.batches
        return not (is_busy or self.is_dirty or self._corrections or self._sent)

    @property
    def running(self) -> int:
        """Sequences to tell Redis: those that run, and those that will if it admits them."""
        return self.usage.running + self.num_pending

    def end(self, lease: object, now: float) -> None:
        """Note that a request has ended."""
        self.usage.running -= self.holds.end(lease, now)
        self.is_dirty |= self.is_counted

    def correct(self, first_ms: int, tokens: int, now: float) -> None:
        """Change the tokens of a batch in Redis, with the next statement."""
        oldest_ms = (now - WINDOW_S - BATCH_S) * 1000
        self._corrections = {first: change for first, change in self._corrections.items() if first > oldest_ms}
        self._corrections[first_ms] = self._corrections.get(first_ms, 0) + tokens
        self.is_dirty = True

    def corrections(self, next_number: int) -> tuple[int, list[int]]:
        """Return the corrections to send now with their number: those not yet confirmed, or else the collected ones."""
        if self._sent is None:
            if not self._corrections:
                return 0, []
            self._sent, self._corrections = (next_number, self._corrections), {}
        number, changes = self._sent
        return number, [value for pair in changes.items() for value in pair]

    def confirm(self, number: int, made_at: float) -> None:
        """Note that Redis has applied a statement made at this time, and the corrections of this number."""
        self.stated_at = max(self.stated_at, made_at)
        if self._sent is not None and self._sent[0] == number:
            self._sent = None
        self.is_dirty |= bool(self._corrections)
