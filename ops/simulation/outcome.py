"""A request in a virtual fleet, and a simulation's counts of all: times by the million, in little memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from shared.messages import Request

_PERCENTS = (50, 99)
_RESOLUTION = 0.01
_SCALE = 1 / math.log1p(_RESOLUTION)


class TokenGaps:
    """Times between two tokens of a stream, as counts of equal ones within one percent."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: Counter[int] = Counter(counts or {})

    def add(self, gap_s: float, times: int) -> None:
        """Count a gap `times` times, once for each stream that had it."""
        self.counts[math.floor(math.log(gap_s) * _SCALE) if gap_s > 0 else -(10**6)] += times

    def percentile(self, percent: float) -> float:
        """Return the seconds below which `percent` of the gaps are; 0 without any."""
        left = self.counts.total() * percent / 100
        for place in sorted(self.counts):
            left -= self.counts[place]
            if left <= 0:
                return math.exp((place + 0.5) / _SCALE)
        return 0.0


def percentile(values: list[float], percent: float) -> float:
    """Return the value below which `percent` of them are; 0 without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """The fleet at a heartbeat."""

    at: float
    running: int
    waiting: int
    kv_share: float
    device_s: float
    num_tokens: int
    num_refusals: int
    num_workers: int


class Outcome(msgspec.Struct, kw_only=True, dict=True):
    """Results as clients saw them, and the fleet's states. Times are seconds, from a client's first attempt on.

    Attributes:
        num_workers: Workers that there were.
        num_refusals: Attempts that were refused.
        num_given_up: Clients that were refused for good.
        num_retried: Clients that were refused first, and then served.
        num_too_long: Requests whose prompt no worker can hold.
        num_unserved: Requests that were waiting when the last worker had died.
        num_moves: Times that a request has lost its worker.
        device_s: Time in which devices computed.
        duration_s: From the first request to the last one's end.
        ttfts_s: Of every request, in the order of their ends, as `ends_s`.
        gaps: Times between tokens, as `TokenGaps` counts them.
        moments: The fleet at each heartbeat.
    """

    num_workers: int = 0
    num_unserved: int = 0
    num_too_long: int = 0
    num_refusals: int = 0
    num_given_up: int = 0
    num_retried: int = 0
    num_moves: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    device_s: float = 0.0
    duration_s: float = 0.0
    ttfts_s: list[float] = []
    ends_s: list[float] = []
    gaps: dict[int, int] = {}
    moments: list[Moment] = []

    @property
    def num_served(self) -> int:
        """Requests that were served."""
        return len(self.ttfts_s)

    @property
    def num_requests(self) -> int:
        """Requests that came."""
        return self.num_served + self.num_given_up + self.num_unserved + self.num_too_long

    @cached_property
    def ttft_s(self) -> dict[int, float]:
        """Percentiles of the time to first token."""
        return {percent: percentile(self.ttfts_s, percent) for percent in _PERCENTS}

    @cached_property
    def itl_s(self) -> dict[int, float]:
        """Percentiles of the times between tokens."""
        gaps = TokenGaps(self.gaps)
        return {percent: gaps.percentile(percent) for percent in _PERCENTS}

    @cached_property
    def end_s(self) -> dict[int, float]:
        """Percentiles of the times of whole answers."""
        return {percent: percentile(self.ends_s, percent) for percent in _PERCENTS}

    @property
    def device_share(self) -> float:
        """Share of the workers' time in which their devices computed."""
        return self.device_s / (self.duration_s * self.num_workers) if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests that were served, each second."""
        return self.num_served / self.duration_s if self.duration_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens that were generated for them, each second."""
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def refused_share(self) -> float:
        """Share of all attempts that were refused."""
        num_attempts = self.num_refusals + self.num_served + self.num_unserved
        return self.num_refusals / num_attempts if num_attempts else 0.0


class Job:
    """One request, from the queue to its end. The worker that has it writes most of this.

    Attributes:
        number: In the queue.
        sent_at: When it was put there.
        first_s: Time to first token.
        last_at: When its last token came, of one that was preempted or lost since.
        emitted: Tokens that came before its worker died.
        num_moves: How often it has lost its worker.
        num_prompt: Tokens of its prompt, and of these `num_cached` that the prefix cache had.
        workers: Those that began it.
    """

    __slots__ = (
        *("_finished", "emitted", "first_s", "is_done", "last_at", "num_cached", "num_moves", "num_prompt"),
        *("number", "request", "sent_at", "workers"),
    )

    def __init__(self, request: Request, finished: Callable[[list[int]], None] | None = None) -> None:
        """Wait; `finished` is called with all generated tokens."""
        self.request = request
        self.number = 0
        self.sent_at = self.last_at = 0.0
        self.first_s: float | None = None
        self.is_done = False
        self.emitted: list[int] = []
        self.num_moves = self.num_prompt = self.num_cached = 0
        self.workers: list[str] = []
        self._finished = finished

    def note_claim(self, worker: str) -> None:
        """Note that a worker has begun it."""
        self.workers.append(worker)

    def note_loss(self) -> None:
        """Note that it has lost its worker."""
        self.num_moves += 1

    def note_first(self, first_s: float, num_prompt: int, num_cached: int) -> None:
        """Note its first token."""
        self.first_s, self.num_prompt, self.num_cached = first_s, num_prompt, num_cached

    def note_end(self, token_ids: list[int]) -> None:
        """Note that it is complete."""
        self.is_done = True
        if self._finished is not None:
            self._finished(token_ids)
