"""The sequences this gateway answers for: for each the truth (prompt and emitted tokens), its attempt and its holder.

Owns the table and the counts of unclaimed requests. Frames, recovery and the dispatcher write it, all on the event
loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from gateway.sinks import Sink
from shared.messages import Request, Usage


@dataclass(slots=True, eq=False)
class Flight:
    """One sequence between its publication and its one terminal event.

    Attributes:
        request: As first published: epoch 0, nothing emitted.
        epoch: The attempt whose deltas count.
        emitted: Tokens received so far, over all attempts.
        worker: Who holds the request in this epoch; None while nobody has claimed it.
        stream_seq: JetStream sequence of this epoch's message, once acknowledged.
        ack: Inbox subject on which this epoch's publication is still to be acknowledged.
        published_at: Loop time of this epoch's publication.
        progressed_at: Loop time of the last delta of this epoch.
        num_lost: Attempts that were claimed and then lost.
        num_moves: Publications after the first, whatever their reason.
        has_prompt_output: The echoed prompt or its log probabilities have been delivered.
    """

    request: Request
    sink: Sink
    estimated_tokens: int
    published_at: float
    epoch: int = 0
    emitted: list[int] = field(default_factory=list)
    worker: str | None = None
    stream_seq: int | None = None
    ack: str | None = None
    progressed_at: float = 0.0
    num_lost: int = 0
    num_moves: int = 0
    prompt_tokens: int = 0
    has_prompt_output: bool = False

    @property
    def id(self) -> str:
        """Request id."""
        return self.request.id

    @property
    def usage(self) -> Usage:
        """Usage as far as the gateway itself knows it."""
        return Usage(self.prompt_tokens, len(self.emitted))

    def attempt(self) -> Request:
        """Return the request of the current epoch, to continue after what has been emitted."""
        request = self.request
        sampling = request.sampling
        if self.has_prompt_output:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            request,
            epoch=self.epoch,
            emitted=tuple(self.emitted),
            echo=request.echo and not self.has_prompt_output,
            sampling=sampling,
        )


class FlightTable:
    """All flights by request id.

    Attributes:
        by_id: For reading in the hot path; only `add` and `remove` change it.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.by_id: dict[str, Flight] = {}
        self._unclaimed: dict[str, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Flight]:
        """Iterate over a snapshot, so that flights may end meanwhile."""
        return iter(list(self.by_id.values()))

    def add(self, flight: Flight) -> None:
        """Take in a flight that nobody has claimed yet."""
        self.by_id[flight.id] = flight
        self._unclaimed.setdefault(flight.request.model, {})[flight.id] = flight.estimated_tokens

    def remove(self, flight: Flight) -> bool:
        """Let go of a flight; False if it had ended already."""
        self._unclaimed.get(flight.request.model, {}).pop(flight.id, None)
        return self.by_id.pop(flight.id, None) is not None

    def claim(self, flight: Flight, worker: str) -> None:
        """Note who holds a flight."""
        flight.worker = worker
        self._unclaimed[flight.request.model].pop(flight.id, None)

    def release(self, flight: Flight) -> None:
        """Note that nobody holds a flight any more."""
        flight.worker = None
        self._unclaimed[flight.request.model][flight.id] = flight.estimated_tokens

    def unclaimed(self, model: str | None = None) -> tuple[int, int]:
        """Return how many requests wait to be claimed, of one model or of all, and their prompt tokens."""
        waiting = self._unclaimed.values() if model is None else [self._unclaimed.get(model, {})]
        return sum(map(len, waiting)), sum(sum(tokens.values()) for tokens in waiting)
