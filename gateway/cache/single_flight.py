"""Single flight: identical deterministic requests of a tenant that are in flight at once share one generation.

The first one leads: its sequences are the ones dispatched. Later ones get the deltas so far at once, then the others as
they come. A client that leaves takes only itself away; when the last one has left, the generation is cancelled.
`SingleFlight` owns the state: at most one generation per key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gateway.cache.recording import merge
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from shared.messages import Delta

_logger = logging.getLogger(__name__)


class SharedSequence:
    """One sequence of a shared generation: a sink that records its deltas and passes them on to all members' sinks."""

    __slots__ = ("_generation", "deltas", "sinks")

    def __init__(self, generation: SharedGeneration) -> None:
        self._generation = generation
        self.deltas: list[Delta] = []
        self.sinks: list[Sink] = []

    def deliver(self, delta: Delta) -> None:
        """Record a delta and pass it on."""
        self.deltas.append(delta)
        # As `_deliver` does, without its call: this is in the hot path.
        for sink in self.sinks:
            try:
                sink.deliver(delta)
            except Exception as error:
                _leave_out(sink, error)
        if delta.finish is not None:
            self._generation.finish_one()

    def fail(self, error: ApiError) -> None:
        """Pass the failure on. No member joins after it, see `SharedGeneration.end`."""
        for sink in self.sinks:
            sink.fail(error)
        self._generation.end()

    def add(self, sink: Sink) -> None:
        """Add a member's sink: it gets the deltas so far as one, and all that follow."""
        self.sinks.append(sink)
        if self.deltas:
            _deliver(sink, merge(self.deltas))


class SharedGeneration:
    """The sequences of one generation, and the members who receive it.

    Attributes:
        sequences: The sinks to dispatch to.
        is_repeated: Its deltas come from the cache.
    """

    def __init__(
        self, num_sequences: int, remove: Callable[[], None], complete: Callable[[SharedGeneration], None]
    ) -> None:
        self.sequences = [SharedSequence(self) for _ in range(num_sequences)]
        self._remove = remove
        self._complete = complete
        self._cancel: Callable[[], None] | None = None
        self._members: list[Sequence[Sink]] = []
        self._num_unfinished = num_sequences
        self._has_ended = False
        self.is_repeated = False

    def dispatched(self, cancel: Callable[[], None]) -> None:
        """Note how to stop the generation when its last member leaves before its end."""
        self._cancel = cancel

    @property
    def has_begun(self) -> bool:
        """Whether members have heard anything of it, its failure included."""
        return self._has_ended or any(sequence.deltas for sequence in self.sequences)

    def join(self, sinks: Sequence[Sink]) -> None:
        """Add a member, with one sink per sequence."""
        self._members.append(sinks)
        for sequence, sink in zip(self.sequences, sinks, strict=True):
            sequence.add(sink)

    def leave(self, sinks: Sequence[Sink]) -> None:
        """Remove a member; one that has left already is ignored."""
        if not any(member is sinks for member in self._members):
            return
        self._members = [member for member in self._members if member is not sinks]
        for sequence, sink in zip(self.sequences, sinks, strict=True):
            sequence.sinks = [other for other in sequence.sinks if other is not sink]
        if not self._members and self._num_unfinished:
            self.end()
            if self._cancel is not None:
                self._cancel()

    def fail(self, error: ApiError) -> None:
        """Fail all sequences: the generation could not be dispatched."""
        for sequence in self.sequences:
            sequence.fail(error)

    def finish_one(self) -> None:
        """Note that one sequence is complete."""
        self._num_unfinished -= 1
        if self._num_unfinished == 0 and not self._has_ended:
            self.end()
            self._complete(self)

    def end(self) -> None:
        """Let no more members join."""
        if not self._has_ended:
            self._has_ended = True
            self._remove()


class SingleFlight:
    """The shared generations in flight, by key."""

    def __init__(self) -> None:
        self._generations: dict[bytes, SharedGeneration] = {}

    def __len__(self) -> int:
        return len(self._generations)

    def find(self, key: bytes) -> SharedGeneration | None:
        """Return the generation in flight for a key."""
        return self._generations.get(key)

    def lead(
        self, key: bytes, num_sequences: int, complete: Callable[[SharedGeneration], None] = lambda shared: None
    ) -> SharedGeneration:
        """Begin a generation that others may join; there must be none for the key. See `SharedGeneration`."""
        assert key not in self._generations, "this generation is in flight already"
        generation = SharedGeneration(num_sequences, lambda: self._remove(key), complete)
        self._generations[key] = generation
        return generation

    def _remove(self, key: bytes) -> None:
        del self._generations[key]


def _deliver(sink: Sink, delta: Delta) -> None:
    try:
        sink.deliver(delta)
    except Exception as error:
        _leave_out(sink, error)


def _leave_out(sink: Sink, error: Exception) -> None:
    """End a sink that fails: it must not keep the delta from the other members."""
    _logger.error("a shared delta could not be delivered", exc_info=error)
    sink.fail(ApiError(500, "The answer could not be delivered.", code="internal_error"))
