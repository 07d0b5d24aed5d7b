"""One key's account at this gateway: a sliding minute of its admissions, its running requests, and its state in Redis.

Admissions within a second of each other form a batch that counts until a full window after its last one. So no window
of that length, wherever it begins, ever holds more than the limit, and memory is bounded by one batch a second.
`gateway/admission/limit_store.py` holds the same rules in Lua, for all gateways together.

Only the rate limiter writes it. It sends Redis the total number of running sequences, and token corrections under a
number that makes Redis apply each once: unconfirmed statements are repeated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from gateway.admission.hold_times import HoldTimes

WINDOW_S = 60.0
BATCH_S = 1.0

LimitName = Literal["requests", "tokens", "concurrency"]


@dataclass(slots=True)
class Batch:
    """Admissions close together: times of the first and the last, and what they add up to while in the window."""

    first: float
    last: float
    requests: int = 0
    tokens: int = 0
    is_in_window: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one key, or of all keys of one tenant. None does not limit.

    Attributes:
        requests: A minute.
        tokens: A minute.
        concurrency: Sequences at once.
        are_reads: `tokens` are reads of stored data.
        owner: Whose limits they are.
    """

    requests: int | None
    tokens: int | None
    concurrency: int | None
    are_reads: bool = False
    owner: Literal["key", "tenant"] = "key"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one admission check, before or after which nothing else happened.

    Attributes:
        exceeded: The limit in the way, or None when admitted.
        retry_after_s: When the same request would be admitted, if nothing else comes in between; 0 for `concurrency`,
            which the window knows nothing about.
        requests, tokens: Admitted in the current window, this request included if it was.
        reset_s: Until the window is empty again.
    """

    exceeded: LimitName | None
    retry_after_s: float
    requests: int
    tokens: int
    reset_s: float


@dataclass(slots=True, eq=False)
class KeyUsage:
    """One key's window and its running sequences. Owned by the rate limiter, which is its one writer."""

    batches: deque[Batch] = field(default_factory=deque)
    requests: int = 0
    tokens: int = 0
    running: int = 0

    def admit(self, now: float, limits: Limits, tokens: int, sequences: int) -> tuple[Verdict, Batch | None]:
        """Check a request against the limits and, if it fits, count it; returns the batch it went into."""
        self.forget_before(now - WINDOW_S)
        exceeded, retry_after_s = self._exceeded(now, limits, tokens, sequences)
        batch = None if exceeded else self.record(now, tokens, sequences)
        reset_s = self.batches[-1].last + WINDOW_S - now if self.batches else 0.0
        return Verdict(exceeded, retry_after_s, self.requests, self.tokens, reset_s), batch

    def record(self, now: float, tokens: int, sequences: int) -> Batch:
        """Count a request that has been admitted, and return the batch it went into."""
        self.forget_before(now - WINDOW_S)
        if not self.batches or now - self.batches[-1].first >= BATCH_S:
            self.batches.append(Batch(now, now))
        batch = self.batches[-1]
        batch.last = max(batch.last, now)
        batch.requests += 1
        self.requests += 1
        self.adjust(batch, tokens)
        self.running += sequences
        return batch

    def adjust(self, batch: Batch, tokens: int) -> None:
        """Add tokens to a batch, or take them back; one that has left the window no longer counts."""
        batch.tokens += tokens
        if batch.is_in_window:
            self.tokens += tokens

    def forget_before(self, time: float) -> None:
        """Drop the batches whose last admission was before `time`."""
        while self.batches and self.batches[0].last <= time:
            batch = self.batches.popleft()
            batch.is_in_window = False
            self.requests -= batch.requests
            self.tokens -= batch.tokens

    def _exceeded(self, now: float, limits: Limits, tokens: int, sequences: int) -> tuple[LimitName | None, float]:
        # Waiting for one limit must be enough for the other, too: the longer wait is the one to tell.
        waits: list[tuple[float, LimitName]] = []
        if limits.requests is not None and self.requests + 1 > limits.requests:
            waits.append((self._wait(now, requests=self.requests + 1 - limits.requests, tokens=0), "requests"))
        if limits.tokens is not None and self.tokens + tokens > limits.tokens:
            waits.append((self._wait(now, requests=0, tokens=self.tokens + tokens - limits.tokens), "tokens"))
        if waits:
            wait_s, name = max(waits)
            return name, wait_s
        if limits.concurrency is not None and self.running + sequences > limits.concurrency:
            return "concurrency", 0.0
        return None, 0.0

    def _wait(self, now: float, requests: int, tokens: int) -> float:
        for batch in self.batches:
            requests -= batch.requests
            tokens -= batch.tokens
            if requests <= 0 and tokens <= 0:
                return batch.last + WINDOW_S - now
        return WINDOW_S


@dataclass(slots=True, eq=False)
class KeyAccount:
    """One key as one gateway knows it.

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

    usage: KeyUsage = field(default_factory=KeyUsage)
    holds: HoldTimes = field(default_factory=HoldTimes)
    num_pending: int = 0
    num_calls: int = 0
    version: int = 0
    is_dirty: bool = False
    is_counted: bool = False
    stated_at: float = 0.0
    _corrections: dict[int, int] = field(default_factory=dict)
    _sent: tuple[int, dict[int, int]] | None = None

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
