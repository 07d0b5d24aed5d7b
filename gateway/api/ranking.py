"""Which answers to a prompt are returned, where more are generated than were asked for (`best_of`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from shared.messages import Delta


class RankedSink:
    """Adds up the log probabilities of a choice's tokens on their way to the choice's own sink."""

    __slots__ = ("_num_tokens", "_shows_logprobs", "_sink", "_total")

    def __init__(self, sink: Sink, *, shows_logprobs: bool) -> None:
        """Stand before `sink`, which gets the log probabilities only if it `shows_logprobs`."""
        self._sink = sink
        self._shows_logprobs = shows_logprobs
        self._total = 0.0
        self._num_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """Mean of the tokens' natural logs; 0 without tokens."""
        return self._total / self._num_tokens if self._num_tokens else 0.0

    def deliver(self, delta: Delta) -> None:
        """Count what a delta brings, and pass it on."""
        if delta.logprobs is not None:
            self._total += sum(entry.logprob for entry in delta.logprobs)
            self._num_tokens += len(delta.logprobs)
            if not self._shows_logprobs:
                delta = msgspec.structs.replace(delta, logprobs=None)
        self._sink.deliver(delta)

    def fail(self, error: ApiError) -> None:
        """Pass it on."""
        self._sink.fail(error)


def likeliest(mean_logprobs: Sequence[float], n: int, num_returned: int) -> list[int]:
    """Return which choices to return, prompt by prompt, and of each prompt the likeliest first.

    Args:
        mean_logprobs: One per sequence, `n` for each prompt.
        n: Sequences of a prompt.
        num_returned: Choices of a prompt that are returned. Of equally likely ones the first are.
    """
    chosen: list[int] = []
    for first in range(0, len(mean_logprobs), n):
        places = sorted(range(first, first + n), key=lambda place: -mean_logprobs[place])
        chosen += places[:num_returned]
    return chosen
