"""The deltas of a generation's sequences, recorded on their way to the client: what the response cache keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from shared.messages import Delta, Usage


class RecordedSink:
    """Records the deltas of one sequence, and passes them on."""

    __slots__ = ("_recording", "_sink", "deltas")

    def __init__(self, recording: Recording, sink: Sink) -> None:
        self._recording = recording
        self._sink = sink
        self.deltas: list[Delta] = []

    def deliver(self, delta: Delta) -> None:
        """Record a delta and pass it on."""
        self._recording.has_begun = True
        self.deltas.append(delta)
        self._sink.deliver(delta)
        if delta.finish is not None:
            self._recording.finish_one()

    def fail(self, error: ApiError) -> None:
        """Pass the failure on."""
        self._recording.has_begun = True
        self._sink.fail(error)


class Recording:
    """The sinks of one generation; `complete` gets its deltas once all sequences have finished.

    Attributes:
        sinks: The sinks to dispatch to.
        has_begun: The client has heard anything of it, its failure included.
    """

    def __init__(self, sinks: Sequence[Sink], complete: Callable[[list[list[Delta]]], None]) -> None:
        self.sinks = [RecordedSink(self, sink) for sink in sinks]
        self.has_begun = False
        self._complete = complete
        self._num_unfinished = len(sinks)

    def finish_one(self) -> None:
        """Note that one sequence has finished."""
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self._complete([sink.deltas for sink in self.sinks])


def tokens_so_far(deltas: Sequence[Delta]) -> tuple[int, int]:
    """Return how many prompt tokens and generated tokens the deltas of one sequence stand for."""
    prompt = next((delta.prompt_tokens for delta in deltas if delta.prompt_tokens is not None), 0)
    return prompt, sum(len(delta.token_ids) for delta in deltas)


def is_complete(deltas: Sequence[Delta]) -> bool:
    """Whether deltas are one whole sequence: no token missing or double, and an end, which is the last of them."""
    position = 0
    for delta in deltas:
        if delta.seq != position:
            return False
        position += len(delta.token_ids)
    return bool(deltas) and deltas[-1].finish is not None and all(delta.finish is None for delta in deltas[:-1])


def as_cached(delta: Delta) -> Delta:
    """Return a delta as a cached answer sends it: all prompt tokens were cached, and none was drafted."""
    if delta.finish is None or delta.finish.usage is None:
        return delta
    own = delta.finish.usage
    counts = own.prompt_tokens, own.completion_tokens, own.prompt_tokens
    usage = Usage(*counts, evicted_tokens=own.evicted_tokens, evicted_by=own.evicted_by)
    return msgspec.structs.replace(delta, finish=msgspec.structs.replace(delta.finish, usage=usage))
