"""The sequences this gateway answers for: for each the truth (prompt and emitted tokens), its attempt and its holder.

Owns the table and the counts of requests that no heartbeat shows yet. Frames, recovery and the dispatcher write it, all
on the event loop's thread.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import urandom

import msgspec
from msgspec import Struct

from gateway.dispatch.flight_log import EvictionLog, FlightLog, Loss
from gateway.dispatch.sinks import Sink
from gateway.fleet.fleet_load import FleetLoad
from shared.disaggregation import KvReady
from shared.messages import Delta, Request, Usage
from shared.subjects import Queue
from shared.timeline import Attempt

EPOCHS_OF_ONE = 1 << 20
"""More attempts than one gateway can make. Another one that takes a request over begins at a multiple of it."""
_KEY_BYTES = 6
_KEY_CHARACTERS = 8
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def new_key() -> str:
    """Return a key that is unique among requests with one `x-request-id`; it prefixes the ids of the sequences."""
    return b2a_base64(urandom(_KEY_BYTES), newline=False).translate(_URL_SAFE).decode()


def key_of(sequence_id: str) -> str:
    """Return the key of a sequence's request."""
    return sequence_id[:_KEY_CHARACTERS]


@dataclass(slots=True, eq=False)
class _Progress:
    """The fields of a flight that must be given, and those that every token uses: such slots lie together."""

    request: Request
    sink: Sink
    estimated_tokens: int
    published_at: float
    epoch: int = 0
    emitted: list[int] = field(default_factory=list)
    worker: str | None = None
    progressed_at: float = 0.0
    awaited_in: _Count | None = None


@dataclass(slots=True, eq=False)
class Flight(_Progress):
    """One sequence between its publication and its one terminal event.

    Attributes:
        request: As first published: epoch 0, nothing emitted. Its deadline is renewed with each epoch, so that it is
            right by the wall clock of the day.
        epoch: The attempt whose deltas count.
        emitted: Tokens received so far, over all attempts.
        worker: Holder of the request in this epoch; None while it is unclaimed.
        has_begun: A worker has claimed it, in this epoch or an earlier one.
        queue: Where this epoch's message is.
        ready: Where the KV of its prompt is, for the epoch after the one that has computed it.
        stream_seq: JetStream sequence of this epoch's message, once acknowledged.
        is_promised: Its client knows that it has begun; set by the window of its answer.
        was_stored: The queue has acknowledged a message of it, of whatever epoch.
        ack: Inbox subject on which this epoch's publication is still to be acknowledged.
        refused_at: Loop time since which the queue has not taken it, in one publication after the other.
        published_at: Loop time of this epoch's publication, for its timeouts: pauses of this process move it.
        delivered_at: Loop time since which a worker is known to have been sent it; None while it may be in the queue.
        submitted_at: Loop time at which it was dispatched first.
        expires_at: Loop time of the deadline, which the wall clock cannot move; None without one.
        progressed_at: Loop time of the last delta of this epoch that held something, or claimed it.
        heard_at: Loop time at which its holder last said that it waits there.
        reconnected_at: Loop time of the first reconnect to NATS after the last delta; older than that delta if none.
        start: Tokens that had been emitted when this epoch began.
        num_moves: Moves since the last progress, without those for which no worker was at fault. The token with which a
            prefill worker hands it over is no progress here: it shows nothing of the workers that decode.
        num_unclaimed: Stored publications that were not claimed, since a worker has claimed one for more than a
            handover, and
        num_disturbed: those of them that may have gone to a worker that had just died.
        losses: Deaths of workers that held it, since an attempt has shown that it is harmless.
        probation: Tokens that this epoch's attempt has to produce until it counts as harmless; 0 without suspicion.
        is_parked: Waits, unpublished, until its probation may begin.
        is_held_back: Came while NATS was away, and has never been published.
        evicted: Blocks that its attempts have evicted by attention, which the next one repeats.
        has_prompt_output: The echoed prompt or its log probabilities came without a token.
        log: Its attempts, for its timeline.
        counted_in, awaited_in: Written by the table alone.
    """

    expires_at: float | None = None
    submitted_at: float = 0.0
    delivered_at: float | None = None
    has_begun: bool = False
    queue: Queue = "interactive"
    ready: KvReady | None = None
    stream_seq: int | None = None
    was_stored: bool = False
    is_promised: bool = False
    ack: str | None = None
    refused_at: float | None = None
    heard_at: float = -1.0
    reconnected_at: float = -1.0
    start: int = 0
    num_moves: int = 0
    num_unclaimed: int = 0
    num_disturbed: int = 0
    losses: list[Loss] = field(default_factory=list)
    probation: int = 0
    is_parked: bool = False
    is_held_back: bool = False
    prompt_tokens: int = 0
    evicted: EvictionLog | None = None
    has_prompt_output: bool = False
    counted_in: _Count | None = None
    log: FlightLog = field(default_factory=FlightLog)

    @property
    def id(self) -> str:
        """Request id."""
        return self.request.id

    @property
    def is_new(self) -> bool:
        """Whether nothing has shown that the queue has ever had it: where that has no place for it, it is refused."""
        return not (self.was_stored or self.has_begun or self.is_promised)

    @property
    def last_epoch(self) -> int:
        """The last attempt that this gateway may make: later ones are of a gateway that has taken the request over."""
        return self.epoch | (EPOCHS_OF_ONE - 1)

    @property
    def num_produced(self) -> int:
        """Tokens that this epoch's attempt has delivered."""
        return len(self.emitted) - self.start

    @property
    def is_on_probation(self) -> bool:
        """Whether this epoch's attempt is suspected of killing its worker."""
        return self.num_produced < self.probation

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields that name the request in log lines, beside its own id."""
        return {"request_id": self.request.trace or ""}

    @property
    def usage(self) -> Usage:
        """Usage as far as the gateway itself knows it."""
        return Usage(self.prompt_tokens, len(self.emitted))

    def attempt_ended(self, end: str, now: float, began_at: float = 0.0) -> Attempt:
        """Return the timeline entry of the present attempt, which ends now; its times are since `began_at`."""
        log, claimed_at = self.log, self.log.claimed_at
        published_at = self.published_at if log.published_at is None else log.published_at
        return Attempt(
            epoch=self.epoch,
            why=log.why,
            published_s=max(0.0, published_at - began_at),
            claimed_s=None if claimed_at is None else max(0.0, claimed_at - began_at),
            worker=self.worker,
            ended_s=max(0.0, now - began_at),
            end=end,
            tokens=self.num_produced,
            receipt=log.receipts.get(self.epoch),
            pauses=tuple((max(0.0, at - began_at), lost_s) for at, lost_s in log.pauses),
            num_pauses=log.num_pauses,
            paused_s=log.paused_s,
        )

    def discount_pause(self, lost_s: float, now: float) -> None:
        """Move the times of its timeouts by a pause that has just ended; those of its timeline stay."""
        log = self.log
        if log.published_at is None:
            log.published_at = self.published_at
        log.note_pause(now, lost_s)
        for name in ("published_at", "progressed_at", "heard_at", "reconnected_at", "delivered_at"):
            if (at := getattr(self, name)) is not None:
                setattr(self, name, min(now, at + lost_s))

    def attempt(self) -> Request:
        """Return the request of the current epoch, to continue after the emitted tokens."""
        if not (self.epoch or self.emitted or self.has_prompt_output or self.probation):
            # The first attempt of nearly every request: nothing has changed.
            return self.request
        request = self.request
        sampling = request.sampling
        # The details of the prompt come with the first token.
        has_prompt_output = self.has_prompt_output or bool(self.emitted)
        if has_prompt_output:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            request,
            epoch=self.epoch,
            emitted=tuple(self.emitted),
            echo=request.echo and not has_prompt_output,
            return_prompt_token_ids=request.return_prompt_token_ids and not has_prompt_output,
            sampling=sampling,
            probation=self.probation,
            ready=self.ready,
            evicted=None if self.evicted is None else self.evicted.told(),
        )

    def note_kept(self) -> None:
        """Note that the attempt ends otherwise than by a handover: reset the counts that it has proved wrong."""
        if self.worker is not None:
            self.num_unclaimed = self.num_disturbed = 0
        if self.num_produced:
            self.num_moves = 0

    def note_evicted(self, delta: Delta) -> None:
        """Log the evictions that a delta reports; an impossible report drops the log."""
        assert delta.evicted is not None, "the delta reports none"
        log, num_tokens = self.evicted or EvictionLog(), self.prompt_tokens + len(self.emitted)
        self.evicted = log if log.add(delta.evicted, self.request.kv_budget, num_tokens) else None


class _Count(Struct, gc=False):
    requests: int = 0
    tokens: int = 0


_NOTHING = _Count()


def _moved(flight: Flight, before: _Count | None, after: _Count | None) -> _Count | None:
    """Move a flight from the count `before` to `after`; return `after`."""
    if before is not None:
        before.requests -= 1
        before.tokens -= flight.estimated_tokens
    if after is not None:
        after.requests += 1
        after.tokens += flight.estimated_tokens
    return after


class FlightTable:
    """All flights by request id. Read `by_id` in the hot path; only `add` and `remove` change it."""

    def __init__(self) -> None:
        self.by_id: dict[str, Flight] = {}
        self._unclaimed: dict[str, _Count] = {}
        # Claims that the holder's heartbeats do not show yet, by model and worker.
        self._unshown: dict[str, dict[str, _Count]] = {}
        # Claims whose attempt has produced nothing yet, by model: what can be waiting in workers.
        self._awaited: dict[str, _Count] = {}
        # By model and tenant.
        self._of_tenants: dict[str, dict[str, _Count]] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self.by_id.values()))

    def add(self, flight: Flight) -> None:
        """Add an unclaimed flight."""
        request = flight.request
        self.by_id[request.id] = flight
        _moved(flight, None, self._of_tenants.setdefault(request.model, {}).setdefault(request.tenant, _Count()))
        flight.counted_in = _moved(flight, None, self._unclaimed.setdefault(request.model, _Count()))

    def remove(self, flight: Flight) -> bool:
        """Let go of a flight; False if it had ended already."""
        if self.by_id.pop(flight.request.id, None) is None:
            return False
        flight.counted_in = _moved(flight, flight.counted_in, None)
        if flight.awaited_in is not None:
            self.note_output(flight)
        of_tenants, tenant = self._of_tenants[flight.request.model], flight.request.tenant
        _moved(flight, of_tenants[tenant], None)
        if not of_tenants[tenant].requests:
            del of_tenants[tenant]
        return True

    def num_of(self, model: str, tenant: str) -> int:
        """Return how many requests of a model a tenant has here."""
        return self._of_tenants.get(model, {}).get(tenant, _NOTHING).requests

    def share(self, load: FleetLoad, tenant: str) -> FleetLoad | None:
        """Return the rest of a tenant's share of a fleet (`FleetLoad.share`).

        None while no requests of others wait. Those beyond its own belong to other gateways' tenants.
        """
        of_tenants = self._of_tenants.get(load.model, {})
        own, num_tenants = of_tenants.get(tenant, _NOTHING), len(of_tenants) + (tenant not in of_tenants)
        if num_tenants == 1 and load.queued_requests <= own.requests:
            return None
        if not load.queued_requests and sum([count.requests for count in of_tenants.values()]) <= load.num_slots:
            return None
        return load.share(max(2, num_tenants), own.requests, own.tokens)

    def claim(self, flight: Flight, worker: str) -> None:
        """Record the worker that holds a flight."""
        flight.worker, model = worker, flight.request.model
        flight.has_begun = True
        unshown = self._unshown.setdefault(model, {}).setdefault(worker, _Count())
        flight.counted_in = _moved(flight, flight.counted_in, unshown)
        flight.awaited_in = _moved(flight, flight.awaited_in, self._awaited.setdefault(model, _Count()))

    def note_output(self, flight: Flight) -> None:
        """Note that the attempt of a flight has produced something, or ended."""
        flight.awaited_in = _moved(flight, flight.awaited_in, None)

    def release(self, flight: Flight) -> None:
        """Note that a flight has no holder any more."""
        self.note_output(flight)
        flight.worker = None
        unclaimed = self._unclaimed.setdefault(flight.request.model, _Count())
        flight.counted_in = _moved(flight, flight.counted_in, unclaimed)

    def note_heartbeat(self, model: str, worker: str) -> None:
        """Note that a worker's own numbers now show everything it has claimed."""
        # Flights counted there keep their old count, which is not read any more.
        self._unshown.get(model, {}).pop(worker, None)

    def forget_worker(self, worker: str) -> None:
        """Drop the counts of a dead worker."""
        for counts in self._unshown.values():
            counts.pop(worker, None)

    def unclaimed_of(self) -> dict[str, tuple[int, int]]:
        """Return how many requests wait to be claimed, and their prompt tokens, by model."""
        return {model: (count.requests, count.tokens) for model, count in self._unclaimed.items() if count.requests}

    def awaited(self) -> dict[str, tuple[int, int]]:
        """Return how many claimed requests have produced nothing yet, and their prompt tokens, by model."""
        return {model: (count.requests, count.tokens) for model, count in self._awaited.items() if count.requests}

    def num_unclaimed(self) -> dict[str, int]:
        """Return how many requests wait to be claimed, by model."""
        return {model: count.requests for model, count in self._unclaimed.items()}

    def oldest_unclaimed_s(self, now: float) -> dict[str, float]:
        """Return for how long the first of these has waited, by model; looks at every flight. `now` is loop time."""
        oldest = dict.fromkeys(self._unclaimed, 0.0)
        for flight in self.by_id.values():
            if flight.worker is None:
                model = flight.request.model
                oldest[model] = max(oldest[model], now - flight.submitted_at)
        return oldest

    def unshown(self, model: str) -> tuple[int, int]:
        """Return how many requests of a model no worker's heartbeat shows, claimed or not, and their prompt tokens."""
        unclaimed = self._unclaimed.get(model, _NOTHING)
        requests, tokens = unclaimed.requests, unclaimed.tokens
        for count in self._unshown.get(model, {}).values():
            requests += count.requests
            tokens += count.tokens
        return requests, tokens
