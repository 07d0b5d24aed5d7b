"""The dispatcher: takes requests to the queue and tokens from the workers to the sinks.

It owns the flights and sees to it that each ends exactly once: complete, failed, or cancelled. The parts do the work:
`publisher` (to the queue), `frames` (from the workers), `recovery` (moves), `revoker` (taking back), `fleet` (who is
alive), `prober` (who is there).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from gateway.dispatch.frames import FrameReceiver
from gateway.dispatch.inflight import Flight, FlightTable
from gateway.dispatch.nats_watch import NatsWatch
from gateway.dispatch.publisher import Publisher, queue_unavailable
from gateway.dispatch.quarantine import Quarantine
from gateway.dispatch.recovery import Reason, Recovery
from gateway.dispatch.recovery_limits import RecoveryLimits
from gateway.dispatch.revoker import Revoker
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.fleet.claims import OwnRequests
from gateway.fleet.death import Death
from gateway.fleet.fleet import Fleet
from gateway.fleet.heartbeat_receiver import HeartbeatReceiver
from gateway.fleet.liveness import FleetLimits
from gateway.fleet.prober import Prober
from shared.dead_letters import DeadReason
from shared.dependency_wait import RECORDS_LOG_INTERVAL_S, RECORDS_RETRY_S, wait_for
from shared.direct_client import DirectClient
from shared.errors import DependencyError
from shared.log_limit import LogLimit
from shared.messages import Delta, Finish, GatewayHeartbeat, Request, encode
from shared.nats_connection import is_clustered
from shared.pause_detector import PauseDetector
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_interactive_stream, ensure_streams
from shared.subjects import frame_subject, gateway_subject
from shared.task_supervisor import TaskSupervisor

SWEEP_INTERVAL_S = 0.05
# The same while a worker is silent: each sweep that its death is found later is a longer gap in its streams.
SILENT_SWEEP_INTERVAL_S = 0.02
# A sweep that is later than this follows a pause of this process.
PAUSE_S = 0.25
# Shorter ones are usual on a busy machine, and no line in its log.
LONG_PAUSE_S = 1.0
HEARTBEAT_INTERVAL_S = 1.0
STREAM_RETRY_S = 0.25

Ending = Literal["completed", "failed", "cancelled"]

_logger = logging.getLogger(__name__)


class Dispatcher:
    """Requests in flight of one gateway process.

    Attributes:
        reply: Subject on which workers send this gateway's frames.
        fleet: The workers' state.
        nats_watch: Whether NATS answers.
        on_end: Called once per request with how it ended, and for a complete one with what its worker says of that.
    """

    def __init__(
        self,
        nats: DirectClient,
        gateway: str,
        fleet_limits: FleetLimits | None = None,
        recovery_limits: RecoveryLimits | None = None,
        stream_limits: StreamLimits | None = None,
        tasks: TaskSupervisor | None = None,
    ) -> None:
        """Dispatch over `nats` in the name of `gateway`; nothing happens before `start`."""
        self._nats = nats
        self._js: JetStreamContext = nats.jetstream()
        self._gateway = gateway
        self._stream_limits = stream_limits or StreamLimits()
        self._flights = FlightTable()
        self._revoker = Revoker(nats, self._js)
        self._publisher = Publisher(nats)
        own = OwnRequests(self._flights.unshown, self._flights.awaited)
        self.fleet = Fleet(gateway, fleet_limits or FleetLimits(), own)
        self._heartbeats = HeartbeatReceiver(self.fleet, self._flights.note_heartbeat)
        self.nats_watch = NatsWatch(nats)
        self._prober = Prober(nats, self.fleet.liveness)
        self._quarantine = Quarantine(nats, gateway)
        self._recovery = Recovery(
            self._flights,
            self.fleet,
            self._publisher,
            self._revoker,
            self._quarantine,
            self.fail,
            recovery_limits or RecoveryLimits(),
        )
        self._frames = FrameReceiver(self._flights, self._revoker, self, self.fleet.serves_another)
        self._loop = asyncio.get_running_loop()
        self._log_limit = LogLimit(_logger)
        self._stream_created: object = None
        self._tasks = tasks or TaskSupervisor()
        self._running: list[asyncio.Task[None]] = []
        self._restoring: asyncio.Task[None] | None = None
        self._records: asyncio.Task[None] | None = None
        self.reply = frame_subject(gateway)
        self.on_end: Callable[[Flight, Ending, Finish | None], None] = lambda flight, ending, finish: None

    async def start(self) -> None:
        """Wait for the interactive stream, subscribe, and begin to sweep and to send heartbeats.

        Raises:
            DependencyError: NATS has closed the connection.
        """
        self._stream_created = await wait_for("the stream of interactive requests", self._ensure_interactive)
        self._publisher.on_stored = self._stored
        self._publisher.on_refused = self._refused
        self._publisher.on_no_stream = self._miss_stream
        self.fleet.liveness.on_dead = self._lose_worker
        self.fleet.liveness.on_reconnected = self._recovery.worker_reconnected
        await self._publisher.start()
        await self._prober.start()
        await self._nats.subscribe_direct(self.reply, self._frames.receive)
        await self._heartbeats.start(self._nats)
        self._running = [
            self._tasks.start(self._sweep(), "sweep of workers and requests"),
            self._tasks.every(HEARTBEAT_INTERVAL_S, self._send_heartbeat, "heartbeats"),
        ]
        self._restore_records()

    async def close(self) -> None:
        """Fail what is still in flight, and stop."""
        self.fail_all(ApiError(503, "The gateway is shutting down.", code="shutting_down", retry_after_s=1.0))
        await self._tasks.stop(*self._running, *(task for task in (self._restoring, self._records) if task is not None))
        await self._recovery.close()
        await self._revoker.close()

    @property
    def num_active(self) -> int:
        """Requests in flight."""
        return len(self._flights)

    def submit(self, request: Request, sink: Sink, estimated_tokens: int, expires_at: float | None = None) -> Flight:
        """Publish a request; its tokens go to `sink`.

        While the connection to NATS has just been lost, the request waits for it to be back, which takes a moment. It
        does not while NATS is silent on a connection that stands.

        Args:
            request: What is asked of a worker.
            sink: Is told of all that comes.
            estimated_tokens: Of its prompt.
            expires_at: Loop time of its deadline. Without it, the wall clock says how far that is away; it may have
                been moved since the request was made.

        Raises:
            ApiError: It cannot be queued. Later failures go to the sink.
        """
        if self.nats_watch.refuses:
            raise queue_unavailable()
        now = self._loop.time()
        if expires_at is None and request.deadline is not None:
            expires_at = now + request.deadline - time.time()
        flight = Flight(request, sink, estimated_tokens, published_at=now, expires_at=expires_at, submitted_at=now)
        is_suspect = self._recovery.is_suspect(flight)
        self._flights.add(flight)
        if is_suspect:
            self._recovery.publish_suspect(flight)
            return flight
        if not self._nats.is_connected and self._recovery.holds_back(now):
            flight.is_held_back = True
            return flight
        try:
            self._publisher.publish(flight)
        except BaseException:
            self._flights.remove(flight)
            raise
        return flight

    def cancel(self, flights: Iterable[Flight]) -> None:
        """Stop requests that nobody waits for any more; those that have ended are left alone."""
        for flight in flights:
            if self._take_back(flight):
                self.on_end(flight, "cancelled", None)

    def complete(self, flight: Flight, delta: Delta) -> None:
        """Deliver a flight's last delta."""
        if self._flights.remove(flight):
            self._recovery.note_answer(flight)
            self.on_end(flight, "completed", delta.finish)
            flight.sink.deliver(delta)

    def fail(self, flight: Flight, error: ApiError) -> None:
        """End a flight with an error, and take it back from the worker that holds it."""
        if self._take_back(flight):
            self.on_end(flight, "failed", None)
            flight.sink.fail(error)

    def fail_all(self, error: ApiError) -> None:
        """End all flights with an error."""
        for flight in self._flights:
            self.fail(flight, error)

    def lose(self, flight: Flight, reason: Reason, why: str) -> None:
        """Dispatch a lost attempt again."""
        self._recovery.lose(flight, reason, why)

    def hand_over(self, flight: Flight) -> None:
        """Dispatch to another worker what this one gives back."""
        self._recovery.move([flight], "handoff")

    def disconnected(self) -> None:
        """Take note that NATS is away."""
        _logger.warning("the connection to NATS is lost")
        self.fleet.liveness.nats_disconnected()
        self._recovery.disconnected(has_others=is_clustered(self._nats), was_silent=self.nats_watch.is_suspected)
        self.nats_watch.disconnected()

    def count_moves(self, on_move: Callable[[Reason], None]) -> None:
        """Tell `on_move` the reason of each re-dispatch."""
        self._recovery.on_move = on_move

    def count_gaps(self, on_gap: Callable[[str, float, int], None]) -> None:
        """Tell `on_gap` a model, a time between two deltas of a stream in seconds, and of how many streams."""
        self._frames.on_gap = on_gap

    def count_quarantined(self, on_quarantine: Callable[[DeadReason], None]) -> None:
        """Tell `on_quarantine` why each request was put into quarantine."""
        self._quarantine.on_take = on_quarantine

    def oldest_unclaimed_s(self) -> dict[str, float]:
        """Return, by model, for how long the request has waited longest that no worker has claimed."""
        return self._flights.oldest_unclaimed_s(self._loop.time())

    def num_unclaimed(self) -> dict[str, int]:
        """Return how many requests of each model no worker has claimed."""
        return self._flights.num_unclaimed()

    async def reconnected(self) -> None:
        """Take note that NATS is back, perhaps without what its memory held."""
        _logger.warning("NATS is back")
        self.fleet.liveness.nats_reconnected(self._loop.time())
        self._recovery.reconnected()
        await self._restore_queue()

    async def _restore_queue(self) -> None:
        """Make the queue again where it is missing, or wait until it is led; publish what nobody has claimed."""
        while self._nats.is_connected:
            try:
                created = await self._ensure_interactive()
            except (DependencyError, NatsError, OSError) as error:
                self._log_limit.warning("queue", "the queue of interactive requests is not there: %s", error)
                await asyncio.sleep(STREAM_RETRY_S)
                continue
            is_same_stream, self._stream_created = created == self._stream_created, created
            _logger.warning("the queue of interactive requests is %s", "there" if is_same_stream else "a new one")
            self._recovery.requeue(is_same_stream)
            self._restore_records()
            return

    async def _ensure_interactive(self) -> object:
        """Make the stream of interactive requests if it is missing; return when it was made."""
        await ensure_interactive_stream(self._js, self._stream_limits)
        return (await self._js.stream_info(INTERACTIVE_STREAM)).created

    def _restore_records(self) -> None:
        """Make the streams of results and dead letters, or wait for them. People do not wait for these.

        A server that has lost its disk has none of them.
        """
        if self._records is None or self._records.done():
            what = "the streams of batch results and dead letters"
            action = partial(ensure_streams, self._js, self._stream_limits)
            waiting = wait_for(what, action, RECORDS_RETRY_S, RECORDS_LOG_INTERVAL_S)
            self._records = self._loop.create_task(waiting)

    def _take_back(self, flight: Flight) -> bool:
        if not self._flights.remove(flight):
            return False
        self._revoker.cancel(flight.request.model, flight.id, None)
        if flight.worker is None and flight.stream_seq is not None:
            self._revoker.delete(flight.stream_seq)
        return True

    def _is_current(self, flight: Flight, epoch: int) -> bool:
        return flight.epoch == epoch and self._flights.by_id.get(flight.id) is flight

    def _stored(self, flight: Flight, epoch: int, stream_seq: int) -> None:
        if self._is_current(flight, epoch):
            flight.stream_seq = stream_seq
            flight.refused_at = None
        elif flight.worker is None or flight.epoch != epoch:
            self._revoker.delete(stream_seq)

    def _refused(self, flight: Flight, epoch: int, error: ApiError) -> None:
        # A later attempt belongs to an answer that has begun: the sweep publishes it again.
        if epoch == 0 and self._is_current(flight, epoch) and flight.worker is None:
            self.fail(flight, error)

    def _miss_stream(self, flight: Flight, epoch: int) -> None:
        is_waiting = self._is_current(flight, epoch) and flight.worker is None
        if is_waiting and not self._recovery.waits_for_stream(flight, is_clustered(self._nats)):
            self.fail(flight, queue_unavailable())
        if self._restoring is None:
            self._restoring = self._loop.create_task(self._restore_queue())
            self._restoring.add_done_callback(self._restored)

    def _restored(self, task: asyncio.Task[None]) -> None:
        self._restoring = None

    def _lose_worker(self, death: Death) -> None:
        self._recovery.lose_worker(death)
        self._flights.forget_worker(death.worker)

    async def _sweep(self) -> None:
        pauses = PauseDetector(SWEEP_INTERVAL_S, PAUSE_S)
        is_odd = False
        while True:
            is_silent = self.fleet.liveness.is_anyone_silent(self._loop.time())
            await asyncio.sleep(SILENT_SWEEP_INTERVAL_S if is_silent else SWEEP_INTERVAL_S)
            now = self._loop.time()
            is_odd = not is_odd
            if pauses.tick():
                level = logging.WARNING if pauses.lost_s >= LONG_PAUSE_S else logging.DEBUG
                _logger.log(level, "this process was paused for %.2f s", pauses.lost_s)
                with self._isolated("taking note of a pause"):
                    self.nats_watch.forget()
                    self.fleet.discount_pause(pauses.lost_s, now)
                    self._recovery.discount_pause(pauses.lost_s, now)
            with self._isolated("the watch of NATS"):
                await self._watch_nats(now)
            # Whether workers can be heard at all must be known before they are judged.
            if not self.nats_watch.owes_answer:
                await self._sweep_fleet(now)
            # There may be thousands of flights, and their times are long.
            if is_odd:
                with self._isolated("the sweep of the requests"):
                    self._recovery.sweep(now, self.nats_watch.is_late)

    async def _sweep_fleet(self, now: float) -> None:
        with self._isolated("the sweep of the fleet"):
            self.fleet.sweep(now)
        probed = self.fleet.liveness.take_probes(now)
        if probed:
            with self._isolated("a ping"):
                await self.nats_watch.ask()
        for worker in probed:
            with self._isolated("a probe"):
                await self._prober.probe(worker, now)

    async def _watch_nats(self, now: float) -> None:
        # What was silent together was not silent by itself: no worker, and no request, is held to it.
        if silent_s := await self.nats_watch.review(now):
            self.fleet.discount_silence(silent_s, now)
            self._recovery.discount_pause(silent_s, now)
        if self.nats_watch.refuses:
            self._recovery.refuse_unsent()

    @contextlib.contextmanager
    def _isolated(self, part: str) -> Iterator[None]:
        """Log what a part of the sweep raises: the other parts, and the next sweep, must not be left out for it."""
        try:
            yield
        except Exception as error:
            self._log_limit.warning(part, "%s failed: %r", part, error, exc_info=error)

    async def _send_heartbeat(self) -> None:
        unclaimed, tokens = self._flights.unclaimed()
        heartbeat = GatewayHeartbeat(
            gateway=self._gateway,
            unclaimed=unclaimed,
            unclaimed_tokens=tokens,
            started=self.fleet.started,
            awaited=self._flights.awaited(),
            unclaimed_of=self._flights.unclaimed_of(),
        )
        await self._nats.publish(gateway_subject(self._gateway), encode(heartbeat))
