"""The consumer: joins queues, intake, engine and outbox, and looks after them while time passes.

Everything here runs on the event loop's thread. The engine is reached through its inbox, and reaches back through the
step relay, which calls `accept` once per step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from functools import partial

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from gpu_worker.consumer.answer import AnswerWriter
from gpu_worker.consumer.batch_lane import PROGRESS_INTERVAL_S, BatchLane
from gpu_worker.consumer.batch_progress import FOLLOWED_INTERVAL_S
from gpu_worker.consumer.batch_queues import BatchQueues
from gpu_worker.consumer.frame_subscribers import FrameSubscribers
from gpu_worker.consumer.gpu_monitor import INTERVAL_S as GPU_INTERVAL_S
from gpu_worker.consumer.heartbeat import INTERVAL_S, HeartbeatSource, MetricsSource, Readings
from gpu_worker.consumer.held_request import HeldRequest, log_fields
from gpu_worker.consumer.interactive_lane import WAITING_INTERVAL_S, InteractiveLane
from gpu_worker.consumer.interactive_queues import InteractiveQueues
from gpu_worker.consumer.operator_orders import OperatorOrders
from gpu_worker.consumer.prefixes.peers import peer_beat
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.queued_message import IN_PROGRESS, REDELIVER, QueuedMessage, send_ack
from gpu_worker.engine.engine_thread import StepOutcome
from shared.background_tasks import BackgroundTasks
from shared.dependency_wait import RECORDS_LOG_INTERVAL_S, RECORDS_RETRY_S, wait_for
from shared.direct_client import DirectClient
from shared.log_limit import LogLimit
from shared.messages import UNDECODABLE, Cancel, Heartbeat, encode
from shared.nats_connection import SEND_ERRORS, inbox_prefix
from shared.pause_detector import PauseDetector
from shared.result_shares import PURGE_INTERVAL_S
from shared.streams import StreamLimits, ensure_interactive_stream, ensure_record_streams
from shared.subjects import ALL_GATEWAYS, cancel_subject, probe_subject, worker_subject, workers_filter
from shared.task_supervisor import TaskSupervisor
from shared.usage_ledger import FLUSH_S

GATEWAY_CHECK_INTERVAL_S = 1.0
SILENCE_S = 1.0
"""Time for which a withdrawing worker is silent: too short for its supervisor to notice."""
_GATEWAY_INBOX = f"{inbox_prefix('gateway')}."

_log = logging.getLogger(__name__)


class Consumer:
    """One worker's side of the queues.

    Attributes:
        withdrawn: Why the worker takes nothing at present; None while it works.
    """

    def __init__(
        self,
        *,
        nats: DirectClient,
        source: HeartbeatSource,
        capacity: PullCapacity,
        writer: AnswerWriter,
        subscribers: FrameSubscribers,
        interactive: InteractiveLane,
        batch: BatchLane,
        limits: StreamLimits,
        tasks: TaskSupervisor,
        readings: Readings,
        drain_asked: asyncio.Event,
    ) -> None:
        """Join the parts; nothing happens before `start`. `drain_asked` is set when an operator asks for a drain."""
        self._log_limit = LogLimit(_log)
        self._nats, self._js = nats, nats.jetstream()
        self._source, self._held, self._affinity = source, source.held, source.affinity
        self._writer = writer
        self._outbox = interactive.outbox
        self._subscribers = subscribers
        self._searches = BackgroundTasks()
        self._interactive, self._batch, self._limits = interactive, batch, limits
        self._pauses = PauseDetector(GATEWAY_CHECK_INTERVAL_S, GATEWAY_CHECK_INTERVAL_S)
        self._tasks = tasks
        self._is_closed = self._is_cordoned = self._is_silent = False
        self.withdrawn: str | None = None
        self._num_withdrawals = 0
        self._withdrawing = asyncio.Lock()
        self._probes: Subscription | None = None
        self._handover = source.handover
        orders = {b"": drain_asked.set, b"cordon": self.cordon, b"uncordon": self.uncordon}
        self._orders = OperatorOrders(nats, source.worker, orders, source.handover, self.send_heartbeat)
        self._decode_cancel = msgspec.msgpack.Decoder(Cancel).decode
        self._own_subject = worker_subject(source.model, source.worker)
        taken = None if source.handover is None else source.handover.taken_queues
        self._interactive_queues = InteractiveQueues(
            nats, source.model, limits, capacity, interactive.take, lambda: source.held.has_suspect, tasks, taken
        )
        self._batch_queue = BatchQueues(
            nats, source.model, limits, source.engine, source.held, capacity, self._interactive_queues, batch, tasks
        )
        self._metrics = MetricsSource(
            source.engine, self._interactive_queues, self._batch_queue, batch.results, readings
        )

    async def start(self) -> None:
        """Wait for the interactive queue, subscribe, and pull; `DependencyError` if NATS closes the connection."""
        queue = "the queue of interactive requests"
        await wait_for(queue, partial(ensure_interactive_stream, self._js, self._limits))
        self._outbox.start()
        await self._subscribers.start()
        await self._nats.subscribe(cancel_subject(self._source.model), cb=self._receive_cancel)
        await self._nats.subscribe(ALL_GATEWAYS, cb=self._receive_gateway)
        await self._answer_probes()
        await self._orders.start()
        begin = partial(self._interactive.take, may_wait=False)
        await self._affinity.start(begin, self._return, self._interactive_queues.wake)
        await self._nats.subscribe(workers_filter(self._source.model), cb=self._receive_worker)
        self._tasks.every(INTERVAL_S, self.send_heartbeat, "heartbeats")
        self._tasks.every(self._limits.ack_wait_s / 3, self._report_progress, "progress of held messages")
        self._tasks.every(PROGRESS_INTERVAL_S, self._batch.save_progress, "progress of batch requests")
        self._tasks.every(FLUSH_S, self._batch.results.flush_usage, "usage of tenants")
        self._tasks.every(FOLLOWED_INTERVAL_S, self._batch.save_followed, "progress of requests that are followed")
        self._tasks.every(WAITING_INTERVAL_S, self._interactive.tell_of_waiting, "word of requests that wait")
        self._tasks.every(GPU_INTERVAL_S, self._metrics.refresh, "readings of the device")
        self._tasks.every(GATEWAY_CHECK_INTERVAL_S, self._drop_for_silent_gateways, "watch of gateways")
        self._tasks.start(self._ensure_records(), "streams of batch results")
        if self._handover is not None:
            parts = self._interactive, self._interactive_queues, self._tasks
            self._handover.start(*parts, self._affinity.has_ended)
        await wait_for(queue, self._interactive_queues.start)
        self._batch_queue.start()

    def accept(self, outcome: StepOutcome) -> None:
        """Pass on what a step did. The hot path: once per step."""
        by_sequence = self._held.by_sequence
        self._outbox.step = outcome.step
        num_held = len(by_sequence)
        for event in outcome.events:
            held = by_sequence.get(event.sequence.id)
            if held is None:
                continue  # cancelled while the step was in flight
            try:
                is_starting = held.prelude is not None
                delta = self._writer.delta(held, event)
                if is_starting and held.prelude is None:
                    self._discount_shared_blocks(held)
                    self._affinity.note_computed(held)
                if held.request.lane == "batch":
                    self._batch.advance(held, delta)
                else:
                    self._interactive.advance(held, delta)
                if self._handover is not None and is_starting and held.prelude is None:
                    self._handover.note_first_output(held)
            except Exception:
                _log.exception("answer failed", extra=log_fields(held.request))
                if self._held.is_current(held):
                    self._lane(held).fail(held, "the worker could not write the answer")
        self._affinity.review()
        if len(by_sequence) < num_held:
            self._interactive_queues.wake()
            self._batch_queue.wake()
        if outcome.stats.is_fatal:
            self._tasks.has_failed.set()

    async def withdraw(self, reason: str) -> None:
        """Behave to others as if this process had died, because the engine has lost everything it had computed.

        Gateways move the requests held here as they do for a dead worker, and blame the same requests. Soon after, the
        worker reappears, and drains until it rejoins.
        """
        is_new, self.withdrawn = self.withdrawn is None, reason
        self._num_withdrawals += 1
        self._note_takes_nothing()
        self._affinity.give_back_all()
        for held in self._held:
            self._lane(held).abandon(held)
        if not is_new:
            return
        async with self._withdrawing:
            self._is_silent = True
            if self._probes is not None:
                with contextlib.suppress(*SEND_ERRORS):
                    await self._probes.unsubscribe()
            await asyncio.sleep(SILENCE_S)
            self._source.begin_life()
            self._is_silent = False
            await self._answer_probes()

    async def rejoin(self) -> None:
        """Take requests again, as a worker that has just started, unless it withdraws once more."""
        num_withdrawals = self._num_withdrawals
        async with self._withdrawing:
            if self._num_withdrawals > num_withdrawals:
                return
            self.withdrawn = None
            self._note_takes_nothing()
        self._interactive_queues.forget()
        self._batch_queue.forget()
        with contextlib.suppress(*SEND_ERRORS):
            await self.send_heartbeat()

    def cordon(self) -> None:
        """Take no more requests, and finish those held; requests that wait for a prefix go back to the queue."""
        self._is_cordoned = True
        self._note_takes_nothing()
        self._affinity.give_back_all()

    def uncordon(self) -> None:
        """Take requests again."""
        self._is_cordoned = False
        self._note_takes_nothing()
        self._interactive_queues.wake()
        self._batch_queue.wake()

    def _note_takes_nothing(self) -> None:
        self._held.is_withdrawn = self._source.is_withdrawn = self._is_cordoned or self.withdrawn is not None

    async def send_heartbeat(self) -> None:
        """Publish the worker's state, unless NATS is away: a heartbeat that is sent later would be stale."""
        if not self._nats.is_connected or self._is_silent:
            return
        await self._nats.publish(*self._heartbeat())

    def disconnected(self) -> None:
        """Keep frames until NATS is back; log it, unless this worker has closed the connection."""
        self._subscribers.disconnected()
        if not self._is_closed:
            _log.warning("connection to NATS lost")

    def connection_closed(self) -> None:
        """End the worker, because the connection is closed and not made again, unless this worker has closed it."""
        if not self._is_closed:
            self._tasks.has_failed.set()

    def reconnected(self) -> None:
        """Make sure of the queues, which NATS may have lost, and pull from them again."""
        _log.warning("connection to NATS is back")
        self._source.num_reconnects += 1
        self._interactive.gateways.restart(time.monotonic())
        if self._handover is not None:
            self._handover.roles.note_reconnected(time.monotonic())
        replies = {held.request.reply for held in self._held if held.request.lane == "interactive"}
        subjects = {*self._outbox.replies, *(reply for reply in replies if reply is not None)}
        self._searches.spawn(self._greet_gateways(self._subscribers.reconnected(subjects)), "search for subscribers")
        self._interactive_queues.forget()
        self._batch_queue.forget()

    async def drain(self, timeout_s: float) -> None:
        """Stop pulling, let running requests finish for `timeout_s`, and give back the others."""
        ends_at = time.monotonic() + timeout_s
        self._source.is_draining = True
        with contextlib.suppress(*SEND_ERRORS):
            await self.send_heartbeat()
        await asyncio.gather(self._interactive_queues.drain(), self._batch_queue.drain())
        self._affinity.stop()
        self._interactive.give_back_waiting()
        self._batch.give_back_suspects()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._held.is_empty.wait()
        for held in self._held:
            self._lane(held).give_back(held)
        self._outbox.flush()
        if self._handover is not None:
            await self._handover.drain(max(0.0, ends_at - time.monotonic()))

    async def close(self) -> None:
        """Send the remaining output, and stop."""
        self._is_closed = True
        await self._tasks.close()
        await self._batch.close()
        await self._outbox.close()
        if self._handover is not None:
            self._handover.close()

    async def _ensure_records(self) -> None:
        what = "the streams of batch results and dead letters"
        action = partial(ensure_record_streams, self._js, self._limits)
        await wait_for(what, action, RECORDS_RETRY_S, RECORDS_LOG_INTERVAL_S)
        self._tasks.every(PURGE_INTERVAL_S, self._batch.results.kept.shares.purge, "shares of tenants in the results")

    async def _answer_probes(self) -> None:
        self._probes = await self._nats.subscribe(probe_subject(self._source.worker), cb=self._answer_probe)

    def _heartbeat(self) -> tuple[str, bytes]:
        return self._own_subject, encode(self._source.heartbeat(self._interactive_queues, self._metrics.metrics()))

    async def _greet_gateways(self, found: AsyncIterator[None]) -> None:
        """Send the kept deltas to gateways that listen again, and a heartbeat, whenever some are found.

        A gateway needs two heartbeats to find the losses of a connection. The first one need not wait for its turn.
        """
        async for _ in found:
            self._outbox.send_kept()
            if self._is_silent:
                continue
            with contextlib.suppress(*SEND_ERRORS):
                self._nats.send(*self._heartbeat())

    def _discount_shared_blocks(self, held: HeldRequest) -> None:
        """Count only the blocks that a request does not share, now that its prefix hits are known."""
        if held.sequence is not None and held.sequence.num_cached_tokens:
            shared = held.sequence.num_cached_tokens // self._source.block_size
            self._held.expect_blocks(held, max(1, held.num_blocks - shared))

    def _lane(self, held: HeldRequest) -> InteractiveLane | BatchLane:
        return self._batch if held.request.lane == "batch" else self._interactive

    async def _receive_cancel(self, message: Msg) -> None:
        try:
            cancel = self._decode_cancel(message.data)
        except UNDECODABLE as error:
            self._log_limit.warning(message.subject, "message is not a cancellation", extra={"error": str(error)})
            return
        if cancel.keep == self._source.worker:
            return
        self._interactive.cancel(cancel)
        self._batch.cancel(cancel)
        if self._handover is not None:
            self._handover.cancel(cancel)
        self._interactive_queues.wake()

    async def _receive_gateway(self, message: Msg) -> None:
        self._interactive.gateways.note_heartbeat(message.subject, time.monotonic())
        self._source.services.receive_gateway(message.data, time.monotonic())
        if self._handover is not None:
            self._interactive.gateways.note_features(message.subject, message.data)

    async def _answer_probe(self, message: Msg) -> None:
        if message.reply.startswith(_GATEWAY_INBOX):
            with contextlib.suppress(*SEND_ERRORS):
                await self._nats.publish(message.reply, b"")

    def _return(self, message: QueuedMessage) -> None:
        """Give a request back that has waited for its prefix."""
        self._interactive_queues.note_returned(message)
        send_ack(self._nats, message, REDELIVER)

    async def _receive_worker(self, message: Msg) -> None:
        """End this worker if another one of its name was there before: both would answer for each other's requests."""
        if message.subject != self._own_subject:
            if (beat := peer_beat(message.subject, message.data)) is not None:
                self._affinity.note(beat)
                self._source.services.note(beat, time.monotonic())
                if self._handover is not None:
                    self._handover.roles.note(beat, time.monotonic())
            return
        try:
            heartbeat = msgspec.msgpack.decode(message.data, type=Heartbeat)
        except UNDECODABLE:
            return
        if self._source.is_second(heartbeat):
            _log.error("another worker (process %d of its machine) has the name of this one, which ends", heartbeat.pid)
            self._tasks.has_failed.set()

    async def _report_progress(self) -> None:
        for held in self._held:
            send_ack(self._nats, held.message, IN_PROGRESS)

    async def _drop_for_silent_gateways(self) -> None:
        now = time.monotonic()
        # Heartbeats that came while this process was paused are still unread.
        if self._pauses.tick() or not self._nats.is_connected:
            self._interactive.gateways.restart(now)
        else:
            self._interactive.drop_for_silent_gateways(now)
            self._interactive_queues.wake()
