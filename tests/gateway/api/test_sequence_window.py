"""An answer of many sequences has a bounded number of them in the queue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from gateway.api.sequences import SequenceWindow
from gateway.dispatch.inflight import Flight
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from shared.messages import Delta, Finish
from tests.gateway.dispatch_bench import ListSink

END = Delta("r", 0, 0, finish=Finish("stop"))
REFUSAL = ApiError(503, "full")


class Queue:
    """Stands for the dispatcher: flights are the numbers of sequences."""

    def __init__(self, refuses: int | None = None) -> None:
        self.sinks: dict[int, Sink] = {}
        self.cancelled: list[Any] = []
        self.refuses = refuses

    def submit(self, index: int, sink: Sink) -> Flight:
        if index == self.refuses:
            raise REFUSAL
        assert index not in self.sinks
        self.sinks[index] = sink
        return cast("Flight", index)

    def cancel(self, flights: Iterable[Flight]) -> None:
        self.cancelled += flights


def window_of(count: int, size: int, refuses: int | None = None) -> tuple[Queue, list[ListSink], SequenceWindow]:
    queue, sinks = Queue(refuses), [ListSink() for _ in range(count)]
    return queue, sinks, SequenceWindow(queue.submit, queue.cancel, sinks, size)


def test_next_sequence_goes_when_one_has_ended() -> None:
    queue, sinks, window = window_of(7, 3)
    window.begin()
    order = [1, 0, 3, 2, 4, 6, 5]
    for number, index in enumerate(order):
        assert len(queue.sinks) == min(7, 3 + number)
        queue.sinks[index].deliver(Delta("r", 0, 0, prompt_tokens=3))
        assert len(queue.sinks) == min(7, 3 + number)
        queue.sinks[index].deliver(END)
    assert all(sink.deltas[-1] is END for sink in sinks)
    assert window.flights == list(range(7))


def test_few_sequences_go_at_once_to_their_own_sinks() -> None:
    queue, sinks, window = window_of(3, 3)
    window.begin()
    assert list(queue.sinks.values()) == sinks


def test_nothing_goes_after_a_failure_or_a_cancellation() -> None:
    for end in ("fail", "cancel"):
        queue, _, window = window_of(7, 3)
        window.begin()
        if end == "fail":
            queue.sinks[1].fail(REFUSAL)
        else:
            window.cancel()
            assert queue.cancelled == [0, 1, 2]
        queue.sinks[0].deliver(END)
        assert len(queue.sinks) == 3


def test_refusal_at_the_beginning_takes_the_others_back() -> None:
    queue, _, window = window_of(7, 3, refuses=2)
    with pytest.raises(ApiError):
        window.begin()
    assert queue.cancelled == [0, 1]


def test_later_refusal_goes_to_the_sink_of_the_sequence() -> None:
    queue, sinks, window = window_of(7, 3, refuses=3)
    window.begin()
    queue.sinks[0].deliver(END)
    queue.sinks[1].deliver(END)
    assert (sinks[3].error, sinks[3].endings) == (REFUSAL, 1)
    assert len(queue.sinks) == 3
