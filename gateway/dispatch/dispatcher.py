"""The dispatcher: takes requests to the queue and tokens from the workers to the sinks.

It owns the flights, and each of them ends exactly once: complete, failed, or cancelled. The modules beside it do the
work, and `fleet` knows who is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from functools import partial
from typing import Literal

import msgspec
from nats.js import JetStreamContext

from gateway.dispatch.frames import FrameReceiver
from gateway.dispatch.inflight import Flight, FlightTable
from gateway.dispatch.nats_watch import NatsWatch
from gateway.dispatch.poison import Quarantine
from gateway.dispatch.publisher import Publisher, queue_unavailable
from gateway.dispatch.queue_streams import QueueStreams
from gateway.dispatch.recovery import Recovery
from gateway.dispatch.revoker import Revoker
from gateway.dispatch.sinks import ScoredSink, Sink
from gateway.dispatch.sweep import Prober, Sweep
from gateway.dispatch.timelines import TimelineKeeper
from gateway.dispatch.timeouts import RecoveryLimits
from gateway.errors import ApiError, shutting_down
from gateway.fleet.adapter_names import NOTHING_READ
from gateway.fleet.deaths import Death
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import OwnRequests
from gateway.fleet.heartbeat_receiver import HeartbeatReceiver
from gateway.fleet.liveness import FleetLimits
from gateway.metrics import GatewayMetrics, MoveReason
from gateway.telemetry.answer_counts import Ending as AnswerEnding
from shared.direct_client import DirectClient
from shared.disaggregation import KvReady
from shared.features import GATEWAY_FEATURES
from shared.hosted_models import ModelOrder
from shared.messages import Delta, Finish, GatewayHeartbeat, Request, encode
from shared.nats_connection import SEND_ERRORS, is_clustered
from shared.server_clock import SYNCHRONIZE_INTERVAL_S, ServerClock
from shared.streams import StreamLimits
from shared.subjects import frame_subject, gateway_subject, model_order_subject
from shared.task_supervisor import TaskSupervisor

Ending = Literal["completed", "failed", "cancelled"]

# vLLM's words for the ends that are not finish reasons of the model.
_FINISHED_REASONS: dict[str, str] = {"cancelled": "abort", "failed": "error"}


class DispatchCounts:
    """Counts ends for the dispatcher; `timelines` hears of ends and receipts."""

    def __init__(self, metrics: GatewayMetrics, timelines: TimelineKeeper | None = None) -> None:
        self.metrics = metrics
        self.timelines = timelines or TimelineKeeper("", 0, metrics.usage)
        self._loop = asyncio.get_running_loop()

    def ended(self, flight: Flight, ending: Ending, finish: Finish | None) -> None:
        """Count an end; `finish` is the worker's report of a complete sequence."""
        self.metrics.sequences[ending] += 1
        self.timelines.sequence_ended(flight, ending, finish)
        reason = _FINISHED_REASONS.get(ending) or ("stop" if finish is None else finish.reason)
        usage, timing = (None, None) if finish is None else (finish.usage, finish.timing)
        total_s = self._loop.time() - flight.submitted_at
        self.metrics.by_model.models[flight.request.model].sequence_ended(reason, total_s, usage, timing)

    def answered(self, flight: Flight, delta: Delta, revision: str) -> None:
        """Count what an answer is like, if one worker of this revision has computed all of it; `delta` is the last."""
        finish = delta.finish
        if finish is None or flight.worker is None or flight.log.ended or flight.start or flight.request.pooling:
            return
        logprob = flight.sink.mean(delta) if isinstance(flight.sink, ScoredSink) else None
        ending: AnswerEnding = (
            "length" if finish.reason == "length" else "stop" if finish.stop is None else "stop_string"
        )
        key = (flight.request.model, flight.worker, revision)
        self.metrics.answers.add(key, len(flight.emitted), ending, logprob)


HEARTBEAT_INTERVAL_S = 1.0

_logger = logging.getLogger(__name__)


class Dispatcher:
    """Requests in flight of one gateway process; workers send its frames to the subject `reply`."""

    def __init__(
        self,
        nats: DirectClient,
        gateway: str,
        fleet_limits: FleetLimits | None = None,
        recovery_limits: RecoveryLimits | None = None,
        stream_limits: StreamLimits | None = None,
        tasks: TaskSupervisor | None = None,
        counts: DispatchCounts | None = None,
    ) -> None:
        self.counts = counts or DispatchCounts(GatewayMetrics())
        js: JetStreamContext = nats.jetstream()
        self._nats = nats
        self.name = gateway
        self.clock = ServerClock()
        self.flights = FlightTable()
        self._revoker = Revoker(nats, js)
        own = OwnRequests(self.flights.unshown, self.flights.awaited)
        self.fleet = Fleet(gateway, fleet_limits or FleetLimits(), own, self._lose_worker, self._worker_reconnected)
        answers = (self._stored, self._refused, self._miss_stream)
        self._publisher = Publisher(nats, self.fleet, self._is_within_share, *answers)
        self._heartbeats = HeartbeatReceiver(self.fleet, self.flights.note_heartbeat)
        self.nats_watch = NatsWatch(nats)
        self._prober = Prober(nats, self.fleet.liveness)
        metrics = self.counts.metrics
        self._quarantine = Quarantine(nats, gateway, metrics.dead_letters)
        self._recovery = Recovery(
            self.flights,
            self.fleet,
            self._publisher,
            self._revoker,
            self._quarantine,
            self.fail,
            recovery_limits or RecoveryLimits(),
            self.clock,
            metrics.redispatches,
        )
        timelines, models = self.counts.timelines, metrics.by_model.models
        timelines.watch(lambda: self.flights, self.fleet.num_devices)
        self._frames = FrameReceiver(
            self.flights, self._revoker, self, self.fleet.serves_another, models, timelines.receipt_came
        )
        self._loop = asyncio.get_running_loop()
        self._streams = QueueStreams(nats, js, stream_limits or StreamLimits(), self._recovery.requeue)
        self._sweep = Sweep(self.fleet, self.nats_watch, self._prober, self._recovery)
        self._tasks = tasks or TaskSupervisor()
        self._running: list[asyncio.Task[None]] = []
        self.reply = frame_subject(gateway)

    async def start(self) -> None:
        """Wait for the interactive stream, subscribe, and begin to sweep and to send heartbeats."""
        await self._streams.start()
        await self.clock.synchronize(self._nats)
        await self._publisher.start()
        await self._prober.start()
        await self._nats.subscribe_direct(self.reply, self._frames.receive)
        await self._heartbeats.start(self._nats)
        self._running = [
            self._tasks.start(self._sweep.run(), "sweep of workers and requests"),
            self._tasks.every(HEARTBEAT_INTERVAL_S, self.send_heartbeat, "heartbeats"),
            self._tasks.every(SYNCHRONIZE_INTERVAL_S, partial(self.clock.synchronize, self._nats), "time of NATS"),
        ]
        self._streams.restore_records()

    async def close(self) -> None:
        """Fail all flights, and stop."""
        self.fail_all(shutting_down())
        await self._tasks.stop(*self._running, *self._streams.tasks)
        await self._recovery.close()
        await self._revoker.close()

    def submit(self, request: Request, sink: Sink, estimated_tokens: int, expires_at: float | None = None) -> Flight:
        """Publish a request; its tokens go to `sink`.

        While the connection to NATS has just been lost, the request waits for it to be back, which takes a moment. It
        does not while NATS is silent on a connection that stands.

        Args:
            request: For a worker.
            sink: Gets its deltas and its end.
            estimated_tokens: Of its prompt.
            expires_at: Loop time of its deadline. Without it, the wall clock says how far that is away; it may have
                been moved since the request was made.

        Raises:
            ApiError: It cannot be queued. Later failures go to the sink.
        """
        if request.sampling.logprobs is not None:
            sink = ScoredSink(sink)
        return self._submit(self._flight(request, sink, estimated_tokens, expires_at))

    def take_over(
        self, request: Request, sink: Sink, estimated_tokens: int, epoch: int, deltas: Iterable[Delta]
    ) -> Flight:
        """Go on with a request of a gateway that has died; see `submit`.

        Args:
            request: As it was first published.
            sink: Gets what follows `deltas`.
            estimated_tokens: Of its prompt.
            epoch: Higher than any that the other gateway can have used: its attempts are stopped.
            deltas: What its client has.

        Raises:
            ApiError: It cannot be queued.
        """
        flight = self._flight(msgspec.structs.replace(request, reply=self.reply), sink, estimated_tokens)
        flight.epoch, flight.has_begun = epoch, True
        for delta in deltas:
            flight.emitted += delta.token_ids
            flight.prompt_tokens = delta.prompt_tokens or flight.prompt_tokens
            if delta.evicted is not None:
                flight.note_evicted(delta)
            flight.has_prompt_output |= bool(delta.text or delta.prompt_logprobs)
        flight.start = len(flight.emitted)
        self._revoker.cancel(request.model, request.id, epoch - 1)
        return self._submit(flight)

    def _flight(self, request: Request, sink: Sink, estimated_tokens: int, expires_at: float | None = None) -> Flight:
        if self.nats_watch.refuses:
            raise queue_unavailable()
        now = self._loop.time()
        if expires_at is None and request.deadline is not None:
            expires_at = now + request.deadline - self.clock.now()
        return Flight(request, sink, estimated_tokens, published_at=now, expires_at=expires_at, submitted_at=now)

    def _submit(self, flight: Flight) -> Flight:
        is_suspect = self._recovery.is_suspect(flight)
        self.flights.add(flight)
        if is_suspect:
            self._recovery.publish_suspect(flight)
            return flight
        if not self._nats.is_connected and self._recovery.holds_back(flight.submitted_at):
            flight.is_held_back = True
            return flight
        try:
            self._publisher.publish(flight)
        except BaseException:
            self.flights.remove(flight)
            raise
        return flight

    def cancel(self, flights: Iterable[Flight]) -> None:
        """Stop requests whose clients have left; those that have ended are left alone."""
        for flight in flights:
            if self._take_back(flight):
                self.counts.ended(flight, "cancelled", None)

    def let_go(self, flights: Iterable[Flight]) -> None:
        """Leave requests to another gateway: only the attempts that this one has made are stopped."""
        for flight in flights:
            if self.flights.remove(flight):
                self._revoker.cancel(flight.request.model, flight.id, flight.epoch)
                if flight.worker is None and flight.stream_seq is not None:
                    self._revoker.delete(flight.stream_seq)

    def complete(self, flight: Flight, delta: Delta) -> None:
        """Deliver a flight's last delta."""
        if self.flights.remove(flight):
            self._recovery.note_answer(flight)
            self.counts.ended(flight, "completed", delta.finish)
            self.counts.answered(flight, delta, self.fleet.revision(flight.worker))
            flight.sink.deliver(delta)

    def fail(self, flight: Flight, error: ApiError) -> None:
        """End a flight with an error, and take it back from the worker that holds it."""
        if self._take_back(flight):
            self.counts.ended(flight, "failed", None)
            flight.sink.fail(error)

    def fail_all(self, error: ApiError) -> None:
        """End all flights with an error."""
        for flight in self.flights:
            self.fail(flight, error)

    def lose(self, flight: Flight, reason: MoveReason, why: str) -> None:
        """Dispatch a lost attempt again."""
        self._recovery.lose(flight, reason, why)

    def hand_over(self, flight: Flight, ready: KvReady | None) -> None:
        """Dispatch a request that its worker gives back to another one, which finds the KV of its prompt as `ready`.

        Without a token of this attempt it was not computed here: it counts as given back, of which there is a limit.
        """
        is_of_attempt = ready is not None and (ready.request, ready.epoch) == (flight.id, flight.epoch)
        ready = ready if is_of_attempt and flight.num_produced else None
        flight.ready = ready
        self._recovery.move([flight], "handoff" if ready is None else "prefilled")

    def disconnected(self) -> None:
        """Take note that NATS is away."""
        _logger.warning("the connection to NATS is lost")
        self.fleet.liveness.nats_disconnected()
        self._recovery.disconnected(has_others=is_clustered(self._nats), was_silent=self.nats_watch.is_suspected)
        self.nats_watch.disconnected()

    def oldest_unclaimed_s(self) -> dict[str, float]:
        """Return, by model, for how long the request has waited longest that no worker has claimed."""
        return self.flights.oldest_unclaimed_s(self._loop.time())

    def wake_soon(self, model: str) -> None:
        """Have the hosts of a model load it although nothing waits in its queue."""
        order = encode(ModelOrder(action="wake", name=model))
        for host in self.fleet.hosted.hosts_of(model):
            with contextlib.suppress(*SEND_ERRORS):
                self._nats.send(model_order_subject(host), order)

    async def reconnected(self) -> None:
        """Take note that NATS is back, perhaps with an empty memory; unclaimed requests are published again."""
        _logger.warning("NATS is back")
        self.fleet.liveness.nats_reconnected(self._loop.time())
        self._recovery.reconnected()
        await self._streams.restore()

    def _is_within_share(self, flight: Flight) -> bool:
        load = self.fleet.load(flight.request.model)
        share = None if load is None else self.flights.share(load, flight.request.tenant)
        return share is not None and share.free_slots >= 0 and share.free_blocks >= 0

    def _take_back(self, flight: Flight) -> bool:
        if not self.flights.remove(flight):
            return False
        self._revoker.cancel(flight.request.model, flight.id, flight.last_epoch)
        if flight.worker is None and flight.stream_seq is not None:
            self._revoker.delete(flight.stream_seq)
        return True

    def _is_current(self, flight: Flight, epoch: int) -> bool:
        return flight.epoch == epoch and self.flights.by_id.get(flight.request.id) is flight

    def _stored(self, flight: Flight, epoch: int, stream_seq: int) -> None:
        if self._is_current(flight, epoch):
            flight.stream_seq, flight.was_stored = stream_seq, True
            flight.refused_at = None
        elif flight.worker is None or flight.epoch != epoch:
            self._revoker.delete(stream_seq)

    def _refused(self, flight: Flight, epoch: int, error: ApiError) -> None:
        # A request that the queue has had once was admitted: the sweep publishes it again.
        if flight.is_new and self._is_current(flight, epoch) and flight.worker is None:
            self.fail(flight, error)

    def _miss_stream(self, flight: Flight, epoch: int) -> None:
        is_waiting = self._is_current(flight, epoch) and flight.worker is None
        if is_waiting and not self._recovery.waits_for_stream(flight, is_clustered(self._nats)):
            self.fail(flight, queue_unavailable())
        self._streams.restore_soon()

    def _lose_worker(self, death: Death) -> None:
        self._recovery.lose_worker(death)
        self.flights.forget_worker(death.worker)

    def _worker_reconnected(self, worker: str) -> None:
        self._recovery.worker_reconnected(worker)

    async def send_heartbeat(self) -> None:
        """Tell other gateways and workers of this one's state."""
        unclaimed_of, now = self.flights.unclaimed_of(), asyncio.get_running_loop().time()
        heartbeat = GatewayHeartbeat(
            gateway=self.name,
            unclaimed=sum(requests for requests, _ in unclaimed_of.values()),
            unclaimed_tokens=sum(tokens for _, tokens in unclaimed_of.values()),
            started=self.fleet.started,
            awaited=self.flights.awaited(),
            unclaimed_of=unclaimed_of,
            features=GATEWAY_FEATURES,
            services=self.fleet.services.of_silent(now, unclaimed_of, self.fleet.models()),
            # Only gateways of earlier versions tell nothing.
            adapter_names=self.fleet.named_adapters.read or NOTHING_READ,
        )
        await self._nats.publish(gateway_subject(self.name), encode(heartbeat))
