"""One key's account at this gateway: its window, its running requests, and what Redis has yet to be told about it.

Written by the rate limiter alone. Redis is told the number of running sequences as a whole, and corrections of tokens
under a number by which they are applied once: whatever is not confirmed is stated again.
"""

from __future__ import annotations

from gateway.admission.limit_window import BATCH_S, WINDOW_S, KeyUsage

# Weight of the latest request in the mean of how long requests run.
_SMOOTHING = 0.2
MAX_WAIT_S = 60.0


class KeyAccount:
    """What one gateway knows of one key.

    Attributes:
        usage: The window, and the count of running sequences.
        num_pending: Sequences about which Redis is being asked.
        num_calls: Statements under way to Redis.
        version: Of the last statement made.
        is_dirty: Something has changed since then, or Redis did not confirm it.
        is_counted: The key has a limit of sequences at once, so Redis must know how many run.
        stated_at: When the last confirmed statement was made; Unix seconds.
    """

    __slots__ = (
        "_corrections",
        "_hold_s",
        "_leases",
        "_sent",
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
        self.num_pending = 0
        self.num_calls = 0
        self.version = 0
        self.is_dirty = False
        self.is_counted = False
        self.stated_at = 0.0
        self._hold_s: float | None = None
        # Start and sequences by lease, oldest first.
        self._leases: dict[object, tuple[float, int]] = {}
        self._corrections: dict[int, int] = {}
        self._sent: tuple[int, dict[int, int]] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost with the account."""
        is_busy = self.num_calls or self._leases or self.usage.batches
        return not (is_busy or self.is_dirty or self._corrections or self._sent)

    @property
    def running(self) -> int:
        """Sequences to tell Redis: those that run, and those that will if it admits them."""
        return self.usage.running + self.num_pending

    def begin(self, lease: object, now: float, num_sequences: int) -> None:
        """Note that a request runs."""
        self._leases[lease] = (now, num_sequences)

    def end(self, lease: object, now: float) -> None:
        """Note that a request has ended."""
        started, num_sequences = self._leases.pop(lease)
        self.usage.running -= num_sequences
        held_s = max(0.0, now - started)
        self._hold_s = held_s if self._hold_s is None else self._hold_s + _SMOOTHING * (held_s - self._hold_s)
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

    def hold_s(self, now: float) -> float:
        """Return how long requests usually run; while none has ended, twice as long as the oldest has run."""
        if self._hold_s is not None:
            return self._hold_s
        return 2 * max((now - started for started, _ in self._leases.values()), default=0.0)

    def slot_wait_s(self, now: float, missing: int, running: int, hold_s: float) -> float:
        """Predict when `missing` more sequences will have ended.

        Two estimates, of which the longer counts: the rate at which `running` sequences end that run `hold_s` each
        (Little's law), and the age of those that run here: after a burst none of them ends before its time.
        """
        by_rate_s = missing * hold_s / max(1, running)
        by_age_s = 0.0
        for started, num_sequences in self._leases.values():
            missing -= num_sequences
            by_age_s = started + hold_s - now
            if missing <= 0:
                break
        return min(MAX_WAIT_S, max(by_rate_s, by_age_s, 0.0))
