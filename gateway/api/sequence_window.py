"""Dispatches the sequences of one answer, no more than a bounded number at a time: the next goes when one has ended.

So an answer of thousands of sequences takes no more of the queue than an ordinary one, and others come in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.dispatch.inflight import Flight
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from shared.messages import Delta


class SequenceWindow:
    """The sequences of one answer.

    Attributes:
        flights: Those that were dispatched so far.
    """

    def __init__(
        self,
        submit: Callable[[int, Sink], Flight],
        cancel: Callable[[Iterable[Flight]], None],
        sinks: Sequence[Sink],
        size: int,
    ) -> None:
        """Dispatch nothing yet.

        Args:
            submit: Dispatches the sequence with this number.
            cancel: Stops flights.
            sinks: One per sequence.
            size: Sequences that are not ended at once.
        """
        self.flights: list[Flight] = []
        self._submit = submit
        self._cancel = cancel
        self._sinks = list(sinks) if len(sinks) <= size else [_CountedSink(self, sink) for sink in sinks]
        self._size = size
        self._is_open = True

    def begin(self) -> None:
        """Dispatch the first sequences.

        Raises:
            ApiError: One cannot be queued; none is dispatched then.
        """
        try:
            for sink in self._sinks[: self._size]:
                self.flights.append(self._submit(len(self.flights), sink))
        except BaseException:
            self.cancel()
            raise

    def advance(self) -> None:
        """Dispatch the next sequence if there is one: one has ended."""
        place = len(self.flights)
        if not self._is_open or place == len(self._sinks):
            return
        try:
            self.flights.append(self._submit(place, self._sinks[place]))
        except ApiError as error:
            self._sinks[place].fail(error)

    def stop(self) -> None:
        """Dispatch nothing more."""
        self._is_open = False

    def cancel(self) -> None:
        """Stop all sequences; those that have ended are left alone."""
        self.stop()
        self._cancel(self.flights)


class _CountedSink:
    """Passes on what comes, and tells the window of the end."""

    __slots__ = ("_sink", "_window")

    def __init__(self, window: SequenceWindow, sink: Sink) -> None:
        self._window = window
        self._sink = sink

    def deliver(self, delta: Delta) -> None:
        self._sink.deliver(delta)
        if delta.finish is not None:
            self._window.advance()

    def fail(self, error: ApiError) -> None:
        self._window.stop()
        self._sink.fail(error)
