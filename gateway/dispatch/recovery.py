"""What happens when an attempt does not end as it should: re-dispatch from prompt + emitted tokens, or an explicit end.

An attempt is moved when its worker died, handed it over, went silent about it, or left a gap; when no worker claims it
although one could; and when NATS was restarted before it was claimed. Each move raises the epoch, which is the fence:
whatever the old holder still sends no longer counts. A periodic sweep looks after time, for all flights at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from gateway.dispatch import poison
from gateway.dispatch.inflight import Flight, FlightTable
from gateway.dispatch.poison import KnownPoison, ProbationQueue, Quarantine, kind_of
from gateway.dispatch.publisher import Publisher, queue_unavailable
from gateway.dispatch.revoker import Revoker
from gateway.dispatch.timeouts import RecoveryLimits, Timeouts
from gateway.errors import ApiError, cannot_start
from gateway.fleet.deaths import Death
from gateway.fleet.fleet import Fleet
from gateway.metrics import MoveReason
from shared.background_tasks import BackgroundTasks
from shared.server_clock import ServerClock
from shared.subjects import Queue

_logger = logging.getLogger(__name__)

BLAMELESS: tuple[MoveReason, ...] = ("prefilled", "waiting", "unclaimed", "nats_restart")
"""No worker was at fault: the deadline is the only limit to these."""


@dataclass(slots=True)
class _Outage:
    """NATS is away since `since` (loop time); new requests wait `held_back_s` seconds for it to be back."""

    since: float
    held_back_s: float


class Recovery:
    """Moves attempts."""

    def __init__(
        self,
        flights: FlightTable,
        fleet: Fleet,
        publisher: Publisher,
        revoker: Revoker,
        quarantine: Quarantine,
        fail: Callable[[Flight, ApiError], None],
        limits: RecoveryLimits,
        clock: ServerClock,
        counts: Counter[str],
    ) -> None:
        self._clock = clock
        self._flights = flights
        self._fleet = fleet
        self._publisher = publisher
        self._revoker = revoker
        self._quarantine = quarantine
        self._fail = fail
        self._limits = limits
        self._timeouts = Timeouts(limits, fleet)
        self._loop = asyncio.get_running_loop()
        self._known_poison = KnownPoison(self._loop.time)
        self._unexplained = poison.UnexplainedDeaths()
        self._probation = ProbationQueue(flights, fleet.num_workers)
        self._tasks = BackgroundTasks()
        self._outage: _Outage | None = None
        self._counts = counts

    def is_suspect(self, flight: Flight) -> bool:
        """Whether a new flight is like one quarantined lately, and so waits its turn; may raise `ApiError` 500."""
        loss = self._known_poison.find(flight.request)
        if loss is None:
            return False
        flight.losses.append(loss)
        flight.probation = poison.probation(flight)
        return True

    def publish_suspect(self, flight: Flight) -> None:
        """Publish a new flight that is suspected, when no more suspects run than workers."""
        self._probation.add(flight)
        self._publish_soon(self._probation.take_ready())

    def note_answer(self, flight: Flight) -> None:
        """Take note that a flight has been answered: its kind is not poison."""
        if flight.losses:
            self._known_poison.forget(flight)

    def lose(self, flight: Flight, reason: MoveReason, why: str) -> None:
        """Dispatch a lost attempt again, without blame for its worker."""
        _logger.warning("request %s lost its attempt %d: %s", flight.id, flight.epoch, why, extra=flight.log_fields)
        self.move([flight], reason)

    def lose_worker(self, death: Death) -> None:
        """Dispatch again whatever a dead worker held, except for what has killed it."""
        held = [flight for flight in self._flights if flight.worker == death.worker]
        self._unexplained.note(death, poison.note_death(held, death))
        for flight in held:
            if poison.is_to_blame(flight, self._unexplained):
                self._convict(flight, death.worker)
        if held:
            _logger.warning("worker %s died with %d requests", death.worker, len(held))
        self.move([flight for flight in held if flight.id in self._flights.by_id], "worker_dead")

    def waits_for_stream(self, flight: Flight, may_elect: bool) -> bool:
        """Whether a flight for which there was no stream just now waits for one: the sweep publishes it again.

        Args:
            flight: Waits as long as its deadline if it has begun.
            may_elect: The servers of NATS may be electing who leads the stream, which takes up to ten seconds. A new
                request waits for that; without it, the stream is gone.
        """
        now = self._loop.time()
        if flight.refused_at is None:
            flight.refused_at = now
        if flight.is_new and not may_elect:
            return False
        return bool(flight.emitted) or now - flight.refused_at < self._limits.outage_timeout_s

    def move(self, flights: Iterable[Flight], reason: MoveReason) -> None:
        """Publish the next attempt of each flight; the old one is cancelled and its message deleted."""
        ready = []
        for flight in flights:
            if reason != "prefilled":
                flight.note_kept()
            if reason not in BLAMELESS:
                flight.num_moves += 1
            if flight.num_moves > self._limits.max_moves:
                if poison.is_to_blame(flight):
                    self._known_poison.note(flight)
                why = f"No worker kept this request in {flight.num_moves} attempts."
                self._fail(flight, self._quarantine.take(flight, "attempts_exhausted", why))
                continue
            self._begin_epoch(flight, reason)
            self._counts[reason] += 1
            if flight.probation:
                self._probation.add(flight)
            else:
                ready.append(flight)
        self._publish_soon([*ready, *self._probation.take_ready()])

    def sweep(self, now: float, is_nats_late: bool = False) -> None:
        """Look after deadlines, lost claims and silence.

        Args:
            now: Loop time.
            is_nats_late: NATS owes an answer, so silence about a request proves nothing.
        """
        if self._outage is not None:
            is_over = now - self._outage.since > self._limits.outage_timeout_s
            self._sweep_deadlines(queue_unavailable() if is_over else None, now)
            if not self.holds_back(now):
                self._refuse(flight for flight in self._flights if flight.is_held_back)
            return
        self._sweep_deadlines(None, now)
        if is_nats_late:
            return
        is_disturbed = self._fleet.liveness.is_disturbed(now)
        pulled: dict[tuple[str, Queue], tuple[int, int]] = {}
        waiting: dict[str, frozenset[int]] = {}
        failed: dict[str, bool] = {}
        self._move_from_queue_without_takers()
        self._move_cleared()
        for flight in self._flights:
            if flight.worker is not None:
                self._sweep_claimed(flight, flight.worker, now)
            elif not flight.is_parked:
                self._note_delivery(flight, pulled, now)
                model = flight.request.model
                if model not in waiting:
                    waiting[model] = self._fleet.waiting_for_prefix(model)
                    failed[model] = self._fleet.has_failed(model)
                if failed[model]:
                    self._fail(flight, cannot_start(model))
                    continue
                if self._timeouts.is_unclaimed(flight, now, is_disturbed, waiting[model]):
                    self._move_unclaimed(flight, now, is_disturbed)
        self._publish_soon(self._probation.take_ready())

    def discount_pause(self, lost_s: float, now: float) -> None:
        """Do not count the last `lost_s` seconds as silence of the workers: this process was paused."""
        for flight in self._flights:
            flight.discount_pause(lost_s, now)
        if self._outage is not None:
            self._outage.since = min(now, self._outage.since + lost_s)

    def holds_back(self, now: float) -> bool:
        """Whether a new request may wait for the connection to NATS, which is down, to be back. `now` is loop time."""
        return self._outage is None or now - self._outage.since < self._outage.held_back_s

    def disconnected(self, has_others: bool, was_silent: bool = False) -> None:
        """Stop moving anything: NATS is away.

        Args:
            has_others: It has other servers, and new requests wait for one of them.
            was_silent: It has been away for long already: new requests do not wait.
        """
        limits = self._limits
        timeout_s = 0.0 if was_silent else limits.held_back_s
        self._outage = _Outage(self._loop.time(), limits.outage_timeout_s if has_others else timeout_s)

    def refuse_unsent(self) -> None:
        """Refuse the new requests of which NATS has not said that it has them: it is silent."""
        unsent = (
            each
            for each in self._flights
            if each.is_new and each.epoch == 0 and each.ack is not None and each.worker is None
        )
        self._refuse(unsent)

    def _refuse(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            self._fail(flight, queue_unavailable())

    def reconnected(self) -> None:
        """Take note that NATS is back: frames may have been lost. `requeue` follows when its queue is there, too."""
        self._outage = None
        self._expect_loss(self._flights)

    def worker_reconnected(self, worker: str) -> None:
        """Take note that a worker has lost its own connection to NATS: its last frames may have been lost with it."""
        self._expect_loss(flight for flight in self._flights if flight.worker == worker)

    def _expect_loss(self, flights: Iterable[Flight]) -> None:
        now = self._loop.time()
        for flight in flights:
            # Only the first: further ones must not put off the moment at which a lost frame is noticed.
            if flight.reconnected_at <= flight.progressed_at:
                flight.reconnected_at = now

    def requeue(self, is_same_stream: bool) -> None:
        """Republish unclaimed requests; a recreated stream no longer holds them."""
        if not is_same_stream:
            for flight in self._flights:
                # The message is gone, and its number with it.
                flight.stream_seq = flight.delivered_at = None
        waiting = [flight for flight in self._flights if flight.worker is None and not flight.is_parked]
        self.move(waiting, "nats_restart")

    async def close(self) -> None:
        """Wait for publications on their way."""
        await self._tasks.wait()
        await self._quarantine.close()

    def _convict(self, convict: Flight, dead_worker: str) -> None:
        """Quarantine a flight, and fail with it the copies of its request that no live worker runs.

        A copy that has produced many tokens has shown that it is another case.
        """
        self._known_poison.note(convict)
        error = self._quarantine.take(convict, "worker_lost", "Every worker that ran this request died of it.")
        kind, tenant = kind_of(convict.request), convict.request.tenant
        for flight in self._flights:
            if flight.request.tenant != tenant or flight.worker not in {None, dead_worker}:
                continue
            if flight.id not in self._flights.by_id:
                continue  # it ended with another choice of the same answer
            if flight is convict or (poison.may_be_deadly(flight) and kind_of(flight.request) == kind):
                # No worker is left to acknowledge its message, which would go to the next one: it is deleted.
                self._flights.release(flight)
                self._fail(flight, error)

    def _begin_epoch(self, flight: Flight, reason: MoveReason) -> None:
        """Make an end of a flight's attempt wherever it is, and prepare the next."""
        flight.log.end(flight.attempt_ended(reason, self._loop.time()))
        self._revoker.cancel(flight.request.model, flight.id, flight.epoch)
        if flight.stream_seq is not None:
            self._revoker.delete(flight.stream_seq)
        flight.stream_seq = flight.delivered_at = None
        if flight.expires_at is not None:
            deadline = self._clock.now() + flight.expires_at - self._loop.time()
            flight.request = msgspec.structs.replace(flight.request, deadline=deadline)
        flight.probation = poison.probation(flight)
        flight.is_held_back = False
        if flight.ready is not None and flight.ready.epoch != flight.epoch:
            flight.ready = None
        flight.epoch += 1
        flight.start = len(flight.emitted)
        self._publisher.forget(flight)
        self._flights.release(flight)

    def _sweep_deadlines(self, error: ApiError | None, now: float) -> None:
        for flight in self._flights:
            if flight.expires_at is not None and now > flight.expires_at:
                self._fail(flight, timeout_error())
            elif error is not None:
                self._fail(flight, error)

    def _move_from_queue_without_takers(self) -> None:
        """Move what waits in a queue that no live worker of its model takes from.

        These are `resumed` where all are of a version without it, and `ready` where none decodes for others any more.
        """
        waiting = [each for each in self._flights if each.queue != "interactive" and each.worker is None]
        for model, queue in {(each.request.model, each.queue) for each in waiting}:
            takers, workers = self._fleet.takers_of_resumed(model)
            has_takers = takers > 0 if queue == "resumed" else self._fleet.takes(model, queue)
            if workers and not has_takers:
                stranded = [each for each in waiting if (each.request.model, each.queue) == (model, queue)]
                self.move([each for each in stranded if not each.is_parked], "waiting")

    def _move_cleared(self) -> None:
        """Republish queued suspects that have been cleared.

        A suspect begins only on a worker that has nothing else to begin, which may take seconds.
        """
        queued = (each for each in self._flights if each.probation and each.worker is None and not each.is_parked)
        self.move([each for each in queued if poison.is_cleared(each)], "waiting")

    def _note_delivery(self, flight: Flight, pulled: dict[tuple[str, Queue], tuple[int, int]], now: float) -> None:
        """Find out whether an unclaimed request was sent to a worker. `pulled` is kept for the queues of a sweep.

        A suspect may have been given back to the queue, so that later requests prove nothing about it.
        """
        if flight.delivered_at is not None or flight.stream_seq is None or flight.probation:
            return
        queue = flight.request.model, flight.queue
        if queue not in pulled:
            pulled[queue] = self._fleet.pulled(*queue)
        last_returned, last_pulled = pulled[queue]
        if last_returned < flight.stream_seq <= last_pulled:
            flight.delivered_at = now

    def _move_unclaimed(self, flight: Flight, now: float, is_disturbed: bool) -> None:
        _logger.warning(
            "request %s is published again: unclaimed for %.1f s",
            flight.id,
            now - flight.published_at,
            extra=flight.log_fields,
        )
        if flight.stream_seq is not None:
            model = flight.request.model
            poison.note_swallowed(flight, self._fleet.liveness.deaths.since(model, flight.published_at))
            flight.num_unclaimed += 1
            flight.num_disturbed += is_disturbed
        self.move([flight], "unclaimed")

    def _sweep_claimed(self, flight: Flight, worker: str, now: float) -> None:
        limits = self._limits
        quiet_s, num_emitted = now - flight.progressed_at, len(flight.emitted)
        if quiet_s < min(limits.stall_s, limits.reconnect_timeout_s):
            return
        why = f"nothing was heard of it for {quiet_s:.1f} s"
        if self._fleet.liveness.is_gone(worker):
            self.lose(flight, "worker_dead", f"worker {worker} is gone")
        elif quiet_s > (limits.stall_s if num_emitted else limits.prefill_stall_s):
            if now - flight.heard_at > limits.stall_s:
                self.lose(flight, "silent", why)
            elif self._fleet.has_room_elsewhere(
                flight.request.model, worker, flight.estimated_tokens + num_emitted, has_output=num_emitted > 0
            ):
                self.lose(flight, "waiting", f"it has waited for {quiet_s:.1f} s where another worker has room")
        elif max(flight.progressed_at, flight.heard_at) >= flight.reconnected_at:
            return
        elif self._timeouts.has_lost_frames(flight, worker, now):
            self.lose(flight, "nats_restart", why)

    def _publish_soon(self, flights: list[Flight]) -> None:
        if not flights:
            return
        for flight in flights:
            # Some have waited for this since their epoch began.
            flight.published_at = self._loop.time()
        self._tasks.spawn(self._publish(flights))

    async def _publish(self, flights: list[Flight]) -> None:
        await self._revoker.send_cancels()
        for flight in flights:
            if flight.id not in self._flights.by_id or flight.worker is not None:
                continue
            try:
                self._publisher.publish(flight)
            except ApiError as error:
                if error.status == 413:
                    # With what it has emitted it is too large for a message, and will never be smaller.
                    self._fail(flight, error)
                    continue
                # It stays unclaimed; the sweep, or the return of NATS, publishes it again.
                _logger.warning(
                    "request %s could not be published again: %s", flight.id, error, extra=flight.log_fields
                )


def timeout_error() -> ApiError:
    """Return the error of a request whose deadline has passed.

    The official SDKs repeat a 408 unless told otherwise, but the time for this answer is over.
    """
    message = "The request was not finished before its deadline."
    return ApiError(408, message, code="timeout", headers={"x-should-retry": "false"})
