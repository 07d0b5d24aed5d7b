"""Counts what each worker's answers are like: how long, how they end, how likely the model found them. By day of UTC.

Gateways count what they have delivered, once an answer, whatever the worker says of it: a worker that lies changes its
own row alone. Counted are answers of people's lane that one worker computed from the first token to the last.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import MAX_NAME_BYTES, Counter, Revision
from shared.usage_ledger import day_of

LENGTH_BOUNDS = (0, *sorted({round(2 ** (half / 2)) for half in range(34)}))
"""Tokens. Bounds are inclusive, here and below; a last bucket counts larger values."""
LOGPROB_BOUNDS = (*(0.01, 0.02, 0.03, 0.05, 0.07), *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7), *(1, 1.5, 2, 3, 4, 6, 10))
"""Of the negative mean log probability of an answer's tokens, in nats."""
Ending = Literal["stop", "stop_string", "length"]
ENDINGS: tuple[Ending, ...] = ("stop", "stop_string", "length")
"""The model ended its answer; one of the request's stop strings or tokens did; the limit did."""
MAX_ROWS = 512
"""Workers and revisions of one day."""
FORMAT = 1
"""Changes with the buckets: counts of another format are not read."""

_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_BYTES)]


def _counts(num_buckets: int) -> Meta:
    return Meta(min_length=num_buckets, max_length=num_buckets)


class AnswerRow(Struct, frozen=True, array_like=True):
    """The answers of one worker and revision, a count a bucket; `logprobs` are of those that asked for them."""

    model: _Name
    worker: _Name
    revision: Revision
    lengths: Annotated[list[Counter], _counts(len(LENGTH_BOUNDS) + 1)]
    endings: Annotated[list[Counter], _counts(len(ENDINGS))]
    logprobs: Annotated[list[Counter], _counts(len(LOGPROB_BOUNDS) + 1)]

    @property
    def histograms(self) -> tuple[list[int], list[int], list[int]]:
        """In the order of `MEASURES`."""
        return self.lengths, self.endings, self.logprobs


MEASURES = ("length", "finish", "logprob")


class DayCounts(Struct, frozen=True, array_like=True):
    """What one gateway process counted on one day, as it stores it."""

    format: int
    day: str
    rows: Annotated[list[AnswerRow], Meta(max_length=MAX_ROWS)]


class AnswerCounts:
    """Counts; the event loop's thread alone writes it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Count nothing yet. Days are those of `clock`, in Unix seconds."""
        self.clock = clock
        self._days: dict[str, dict[tuple[str, str, str], AnswerRow]] = {}

    @property
    def today(self) -> str:
        """The day, as documents name it."""
        return day_of(self.clock())

    def add(self, key: tuple[str, str, str], num_tokens: int, ending: Ending, logprob: float | None) -> None:
        """Count an answer of a model, worker and revision; `logprob` is the mean over its tokens, if asked for."""
        rows = self._days.setdefault(day_of(self.clock()), {})
        row = rows.get(key)
        if row is None:
            if len(rows) >= MAX_ROWS:
                return
            empty = ([0] * (len(LENGTH_BOUNDS) + 1), [0] * len(ENDINGS), [0] * (len(LOGPROB_BOUNDS) + 1))
            row = rows[key] = AnswerRow(*key, *empty)
        row.lengths[bisect_left(LENGTH_BOUNDS, num_tokens)] += 1
        row.endings[ENDINGS.index(ending)] += 1
        if logprob is not None:
            row.logprobs[bisect_left(LOGPROB_BOUNDS, -logprob)] += 1

    def documents(self) -> list[DayCounts]:
        """Return the counts by day."""
        return [DayCounts(FORMAT, day, list(rows.values())) for day, rows in self._days.items()]

    def forget_days_before(self, day: str) -> None:
        """Let go of earlier days, which are stored."""
        for earlier in [each for each in self._days if each < day]:
            del self._days[earlier]
