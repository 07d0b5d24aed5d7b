"""A sliding minute of one key's admissions, in this process.

Admissions within a second of each other form a batch that counts until a full window after its last one. So no window
of that length, wherever it begins, ever holds more than the limit, and memory is bounded by one batch a second.
`gateway/admission/limit_scripts.py` holds the same rules in Lua, for all gateways together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

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
    """What one key may do, or all keys of one tenant. None does not limit.

    Attributes:
        requests: A minute.
        tokens: A minute.
        concurrency: Sequences at once.
        are_reads: `tokens` are reads of what is stored.
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


class KeyUsage:
    """One key's window and its running sequences. Owned by the rate limiter, which is its one writer."""

    __slots__ = ("batches", "requests", "running", "tokens")

    def __init__(self) -> None:
        """Begin unused."""
        self.batches: deque[Batch] = deque()
        self.requests = 0
        self.tokens = 0
        self.running = 0

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
