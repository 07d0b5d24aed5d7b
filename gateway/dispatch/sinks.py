"""The receiver of a sequence's tokens, as the data path calls it.

The dispatcher gives each sequence one sink and calls it in order: `deliver` for each new delta, the last of which has
`finish`, or `fail` once instead. A sink never waits: it turns a delta into bytes, or keeps it.
"""

from __future__ import annotations

from typing import Protocol

from gateway.errors import ApiError
from shared.messages import Delta, TokenLogprob

_LEAST = -100.0


class Sink(Protocol):
    """Receiver of one sequence."""

    def deliver(self, delta: Delta) -> None:
        """Take a piece. The last delta's `finish.reason` is `stop` or `length`."""

    def fail(self, error: ApiError) -> None:
        """Learn that the sequence ended otherwise; nothing follows."""


class ScoredSink:
    """Adds up the log probabilities on their way to the sink of a request that asked for them."""

    __slots__ = ("_sink", "_sum", "_tokens")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._sum = 0.0
        self._tokens = 0

    def deliver(self, delta: Delta) -> None:
        """See `Sink`."""
        if delta.logprobs:
            self._sum += _sum(delta.logprobs)
            self._tokens += len(delta.logprobs)
        self._sink.deliver(delta)

    def fail(self, error: ApiError) -> None:
        """See `Sink`."""
        self._sink.fail(error)

    def mean(self, last: Delta) -> float | None:
        """Return the mean over the answer with its last piece, which is not delivered yet; None without tokens."""
        own = last.logprobs or ()
        tokens = self._tokens + len(own)
        return (self._sum + _sum(own)) / tokens if tokens else None


def _sum(logprobs: tuple[TokenLogprob, ...]) -> float:
    """Add log probabilities up; those that no token has, by a wrong worker, count as bounds."""
    return sum(min(0.0, max(_LEAST, each.logprob)) for each in logprobs)
