"""What happens when an attempt does not end as it should: re-dispatch from prompt + emitted tokens, or an explicit end.

An attempt is moved when its worker died, handed it over, went silent about it, or left a gap; when nobody claims it
although somebody could; and when NATS was restarted before it was claimed. Each move raises the epoch, which is the
fence: whatever the old holder still sends no longer counts. A periodic sweep looks after time, for all flights at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gateway.errors import ApiError
from gateway.fleet import Fleet
from gateway.inflight import Flight, FlightTable
from gateway.publisher import Publisher, queue_unavailable
from gateway.revoker import Revoker

Reason = Literal["worker_dead", "gap", "handoff", "silent", "unclaimed", "nats_restart", "cancelled"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """How often, and after which silence, attempts are moved. Times are seconds.

    Attributes:
        max_attempts: Claimed attempts of one request, the first included.
        max_moves: Publications after the first, hand-overs and unclaimed ones included.
        stall_s: Silence about a request that has begun to generate.
        prefill_stall_s: Silence about a claimed request before its first token.
        ack_timeout_s: Wait for the queue's acknowledgement.
        claim_patience_s: Wait for a claim while a worker has room and the queue looks empty; doubles with each move.
        tokens_per_patience_s: Prompt tokens that lengthen this patience by a second: tokenizing takes time too.
        reconnect_patience_s: Silence about a generating request after NATS came back.
        outage_patience_s: Absence of NATS after which requests are failed.
    """

    max_attempts: int = 3
    max_moves: int = 16
    stall_s: float = 10.0
    prefill_stall_s: float = 60.0
    ack_timeout_s: float = 3.0
    claim_patience_s: float = 5.0
    tokens_per_patience_s: float = 10_000.0
    reconnect_patience_s: float = 2.0
    outage_patience_s: float = 15.0


class Recovery:
    """Moves attempts.

    Attributes:
        on_move: Called with the reason of each move, for metrics.
    """

    def __init__(
        self,
        flights: FlightTable,
        fleet: Fleet,
        publisher: Publisher,
        revoker: Revoker,
        fail: Callable[[Flight, ApiError], None],
        limits: RecoveryLimits,
    ) -> None:
        """Look after `flights`, once `sweep` is called periodically. `fail` ends a flight with an error."""
        self._flights = flights
        self._fleet = fleet
        self._publisher = publisher
        self._revoker = revoker
        self._fail = fail
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._disconnected_at: float | None = None
        self._reconnected_at: float | None = None
        self.on_move: Callable[[Reason], None] = lambda reason: None

    def lose(self, flight: Flight, reason: Reason, why: str) -> None:
        """Dispatch a lost attempt again, unless it has been lost too often."""
        flight.num_lost += 1
        _logger.warning("request %s lost its attempt %d: %s", flight.id, flight.epoch, why)
        if flight.num_lost >= self._limits.max_attempts:
            message = f"The request was lost {flight.num_lost} times; the last time because {why}."
            self._fail(flight, ApiError(500, message, code="attempts_exhausted"))
        else:
            self.move([flight], reason)

    def lose_worker(self, worker: str) -> None:
        """Dispatch again whatever a dead worker held."""
        for flight in [flight for flight in self._flights if flight.worker == worker]:
            self.lose(flight, "worker_dead", f"worker {worker} died")

    def move(self, flights: Iterable[Flight], reason: Reason) -> None:
        """Publish the next attempt of each flight; the old one is cancelled and its message deleted."""
        moved = []
        for flight in flights:
            if flight.num_moves >= self._limits.max_moves:
                self._fail(flight, ApiError(500, "No worker kept the request.", code="attempts_exhausted"))
                continue
            self._revoker.cancel(flight.request.model, flight.id, flight.epoch)
            if flight.stream_seq is not None:
                self._revoker.delete(flight.stream_seq)
            flight.stream_seq = None
            flight.epoch += 1
            flight.num_moves += 1
            flight.published_at = self._loop.time()
            self._publisher.forget(flight)
            self._flights.release(flight)
            moved.append(flight)
            self.on_move(reason)
        task = self._loop.create_task(self._publish(moved))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def sweep(self, now: float) -> None:
        """Look after deadlines, lost claims and silence. `now` is loop time."""
        if self._disconnected_at is not None:
            is_over = now - self._disconnected_at > self._limits.outage_patience_s
            self._sweep_deadlines(queue_unavailable() if is_over else None)
            return
        self._sweep_deadlines(None)
        for flight in self._flights:
            if flight.worker is None:
                self._sweep_unclaimed(flight, now)
            else:
                self._sweep_claimed(flight, flight.worker, now)

    def disconnected(self) -> None:
        """Stop moving anything: NATS is away."""
        self._disconnected_at = self._loop.time()

    def reconnected(self, is_same_stream: bool) -> None:
        """Publish again what nobody had claimed; a stream that is not the same has lost it."""
        self._disconnected_at = None
        self._reconnected_at = self._loop.time()
        if not is_same_stream:
            for flight in self._flights:
                # The number now belongs to another message, which must not be deleted.
                flight.stream_seq = None
        self.move([flight for flight in self._flights if flight.worker is None], "nats_restart")

    async def close(self) -> None:
        """Wait for publications on their way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _sweep_deadlines(self, error: ApiError | None) -> None:
        wall = time.time()
        for flight in self._flights:
            if flight.request.deadline is not None and wall > flight.request.deadline:
                self._fail(flight, timeout_error())
            elif error is not None:
                self._fail(flight, error)

    def _sweep_unclaimed(self, flight: Flight, now: float) -> None:
        limits = self._limits
        waited = now - flight.published_at
        if flight.ack is not None:
            is_lost = waited > limits.ack_timeout_s
        else:
            patience = limits.claim_patience_s + flight.estimated_tokens / limits.tokens_per_patience_s
            is_lost = waited > patience * 2**flight.num_moves and self._fleet.can_claim(flight.request.model)
        if is_lost:
            _logger.warning("request %s is published again: unclaimed after %.1f s", flight.id, waited)
            self.move([flight], "unclaimed")

    def _sweep_claimed(self, flight: Flight, worker: str, now: float) -> None:
        limits = self._limits
        quiet = now - flight.progressed_at
        if quiet < min(limits.stall_s, limits.reconnect_patience_s):
            return
        why = f"nothing was heard of it for {quiet:.1f} s"
        reconnected = self._reconnected_at
        if self._fleet.is_gone(worker):
            self.lose(flight, "worker_dead", f"worker {worker} is gone")
        elif quiet > (limits.stall_s if flight.emitted else limits.prefill_stall_s):
            self.lose(flight, "silent", why)
        elif (
            reconnected is not None
            and flight.emitted
            and flight.progressed_at < reconnected < now - limits.reconnect_patience_s
        ):
            self.lose(flight, "nats_restart", why)

    async def _publish(self, flights: list[Flight]) -> None:
        await self._revoker.send_cancels()
        for flight in flights:
            if flight.id not in self._flights.by_id or flight.worker is not None:
                continue
            try:
                await self._publisher.publish(flight)
            except ApiError as error:
                # It stays unclaimed; the sweep, or the return of NATS, publishes it again.
                _logger.warning("request %s could not be published again: %s", flight.id, error)


def timeout_error() -> ApiError:
    """Return the error of a request whose deadline has passed.

    The official SDKs repeat a 408 unless told otherwise; nobody waits for this answer any more.
    """
    message = "The request was not finished before its deadline."
    return ApiError(408, message, code="timeout", headers={"x-should-retry": "false"})
