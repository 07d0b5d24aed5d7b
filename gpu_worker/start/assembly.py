"""Puts a worker together: engine thread, text, lanes and queues, over one NATS connection."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gpu_worker.consumer.answer import AnswerWriter, PooledAnswers
from gpu_worker.consumer.batch_lane import BatchLane
from gpu_worker.consumer.batch_progress import ProgressRecords
from gpu_worker.consumer.constraint_source import ConstraintSource
from gpu_worker.consumer.consumer import Consumer
from gpu_worker.consumer.frame_subscribers import FrameSubscribers
from gpu_worker.consumer.golden.prober import ProbeSizes
from gpu_worker.consumer.golden.watch import TICK_S, GoldenSettings, GoldenWatch
from gpu_worker.consumer.gpu_monitor import GpuMonitor
from gpu_worker.consumer.handover import KvHandover
from gpu_worker.consumer.heartbeat import HeartbeatSource, Readings
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.intake import Intake
from gpu_worker.consumer.interactive_lane import InteractiveLane
from gpu_worker.consumer.outbox import Outbox
from gpu_worker.consumer.prefixes.affinity import PeerConnection, PrefixAffinity
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.request_images import RequestImages
from gpu_worker.consumer.request_observer import ReceiptWriter, RequestObserver
from gpu_worker.consumer.request_reader import RequestBudgets, RequestReader
from gpu_worker.consumer.result_store import ResultStore
from gpu_worker.consumer.roles import Roles
from gpu_worker.consumer.tokenizer_service import TokenizerService
from gpu_worker.engine.engine import EngineStats
from gpu_worker.engine.engine_thread import EngineThread, StepRelay
from gpu_worker.media.decoder import can_decode
from gpu_worker.media.prepared_images import PreparedImages
from gpu_worker.models.vision.processor import MediaProcessor
from gpu_worker.start.engine_setup import EngineSetup
from gpu_worker.start.worker_adapters import AdapterAccess, WorkerAdapters
from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.model_tasks import ModelTasks
from gpu_worker.text.prompt_encoder import PromptEncoder
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.direct_client import DirectClient
from shared.disaggregation import Role
from shared.features import FEATURES, IMAGES, KV_BUDGET, KV_SCORES
from shared.media_store import MediaStore
from shared.prefixes import MAX_WAIT_S
from shared.server_clock import SYNCHRONIZE_INTERVAL_S, ServerClock
from shared.streams import StreamLimits
from shared.task_supervisor import TaskSupervisor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """The names that a worker is known by."""

    worker: str
    model: str
    revision: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the model's files say, apart from its weights, and what its answers are compared with."""

    directory: ModelDirectory
    tokenizer: ModelTokenizer
    tasks: ModelTasks
    golden: GoldenSettings | None = None


class Worker:
    """All parts of a running worker.

    Attributes:
        consumer: Drains, and is notified of lost and restored connections.
        has_failed: Set when the worker cannot go on: the engine broke down, NATS has closed the connection for good, or
            a task without which it would do only part of its work has died.
    """

    def __init__(
        self,
        identity: Identity,
        nats: DirectClient,
        setup: EngineSetup,
        model: ServedModel,
        limits: StreamLimits,
        observer: RequestObserver | None = None,
        drain_asked: asyncio.Event | None = None,
        image_memory_bytes: int = 1 << 30,
        prefix_wait_s: float = MAX_WAIT_S,
        watermark_tenants: tuple[str, ...] = (),
        role: Role | None = None,
        adapters: AdapterAccess | None = None,
    ) -> None:
        """Put the parts together; nothing runs before `start`. Call it on the event loop."""
        self._identity, self._nats, self._setup, self._model = identity, nats, setup, model
        self._clock, self._watermark_tenants = ServerClock(), watermark_tenants
        self._tasks = tasks = TaskSupervisor()
        self.has_failed, self._group = tasks.has_failed, setup.group
        sizes, tokenizer = setup.scheduler, model.tokenizer
        self._encoder = encoder = PromptEncoder(tokenizer, sizes.max_model_len, model.tasks.score_form)
        self._engine, self._constraints = EngineThread(setup.engine), ConstraintSource(tokenizer)
        max_len, processor = sizes.max_model_len, _processor(setup)
        self._images = _images(nats, processor, max_len, image_memory_bytes)
        self._service = TokenizerService(nats, identity.model, max_len, tokenizer, encoder, self._clock, processor)
        self._observer, self._held = observer, HeldRequests(self._removed)
        self._adapters = WorkerAdapters(nats, identity.worker, setup.adapting, adapters, self._engine, self._held)
        self._handover = self._make_handover(role)
        pooled, capacity = PooledAnswers(model.tasks), PullCapacity(self._held, sizes)
        own = (self._images, None if self._handover is None else self._handover.fetch, self._adapters.requests)
        parts = (self._reader(pooled), encoder, self._constraints, self._engine, self._held, capacity)
        intake = Intake(*parts, *own)
        subscribers, readings = FrameSubscribers(nats, identity.worker), _readings(setup)
        receipts = ReceiptWriter(1 if setup.group is None else max(1, len(readings.ranks())), readings.gpu.watts)
        batch = self._batch_lane(limits, intake, receipts)
        self._adapters.make_way_by(batch.give_back)
        open_outbox = partial(Outbox, nats, identity.worker, tasks, subscribers)
        affinity = self._make_affinity(capacity, prefix_wait_s)
        ways = (open_outbox, batch.make_way, self._clock, affinity, receipts)
        interactive = InteractiveLane(intake, self._engine, self._held, *ways)
        self.consumer = Consumer(
            nats=nats,
            source=(source := self._heartbeat_source(affinity)),
            capacity=capacity,
            writer=AnswerWriter(tokenizer, pooled, receipts),
            subscribers=subscribers,
            interactive=interactive,
            batch=batch,
            limits=limits,
            tasks=tasks,
            readings=readings,
            drain_asked=drain_asked or asyncio.Event(),
        )
        self._relay = self._make_relay(interactive.outbox.send_now, source)

    def _make_handover(self, role: Role | None) -> KvHandover | None:
        worker, tiers = self._identity.worker, self._setup.tiers
        if role is None or tiers is None or tiers.transfer is None:
            return None
        return KvHandover(worker, tiers.transfer, Roles(worker, role), self._engine, self._held)

    def _make_affinity(self, capacity: PullCapacity, wait_s: float) -> PrefixAffinity:
        peers = PeerConnection(self._nats, self._identity.worker, self._identity.model, self._clock)
        size, adapters = self._setup.scheduler.block_size, self._adapters.requests
        return PrefixAffinity(peers, self._engine, capacity, size, wait_s, self._most_claimed, adapters)

    def _removed(self, held: HeldRequest) -> None:
        if self._handover is not None:
            self._handover.let_go(held)
        if self._observer is not None:
            self._observer.removed(held)

    def _most_claimed(self) -> float:
        return math.inf if self._handover is None else self._handover.roles.most_claimed

    def _reader(self, pooled: PooledAnswers) -> RequestReader:
        model, sizes = self._model, self._setup.scheduler
        return RequestReader(
            self._identity.model,
            model.directory,
            sizes.max_model_len,
            model.tokenizer,
            pooled,
            RequestBudgets(sizes, self._setup.eviction_problem),
            self._clock,
            self._adapters.slots,
            sees=self._images is not None,
            watermark_tenants=self._watermark_tenants,
        )

    def _make_relay(self, send: Callable[[], None], source: HeartbeatSource) -> StepRelay:
        """Return what passes steps on: to golden probes first, where there are any."""
        self._golden: GoldenWatch | None = None
        accept, sizes = self.consumer.accept, self._setup.scheduler
        if (golden := self._model.golden) is not None:
            # A prompt may fill half of the KV cache at most.
            longest = min(sizes.max_model_len, sizes.num_blocks // sizes.num_parts * sizes.block_size // 2)
            fitting = ProbeSizes(longest, sizes.block_size)
            self._golden = GoldenWatch(golden, self._nats, self._engine, self.consumer, source, fitting)
            accept = self._golden.accept
        return StepRelay(asyncio.get_running_loop(), accept, send)

    @property
    def withdrawn(self) -> str | None:
        """Why the worker takes nothing at present, if it has withdrawn by itself."""
        if self._golden is not None and self._golden.has_withdrawn:
            return self._golden.reading().problem
        return self.consumer.withdrawn

    def _follow_group(self) -> None:
        if self._group is None:
            return
        loop, runner, group = asyncio.get_running_loop(), self._group, self._group.group

        def withdraw() -> None:
            self._tasks.start(self.consumer.withdraw(group.lost or "a rank is gone"), "withdrawal")

        def lost() -> None:
            loop.call_soon_threadsafe(withdraw)
            self._engine.call(runner.check)

        def formed() -> None:
            loop.call_soon_threadsafe(lambda: self._tasks.start(self.consumer.rejoin(), "return"))

        group.on_lost, group.on_formed = lost, formed
        if group.lost is not None:
            lost()

    def _heartbeat_source(self, affinity: PrefixAffinity) -> HeartbeatSource:
        identity, model, setup = self._identity, self._model, self._setup
        images = () if self._images is None else (IMAGES,)
        budgets = (KV_BUDGET, KV_SCORES) if setup.eviction_problem is None else ()
        return HeartbeatSource(
            identity.worker,
            identity.model,
            identity.revision,
            self._engine,
            self._held,
            setup.scheduler.block_size,
            setup.scheduler.max_model_len,
            affinity,
            max_prompt_characters=self._encoder.max_characters,
            tasks=model.tasks.names,
            chat_format=model.tokenizer.chat_format,
            sampling_defaults=model.directory.sampling_defaults,
            features=(*FEATURES, *images, *budgets, *self._adapters.features),
            adapters=self._adapters.slots,
            named_adapters=lambda: self._adapters.orders.beats,
            handover=self._handover,
        )

    def _batch_lane(self, limits: StreamLimits, intake: Intake, receipts: ReceiptWriter) -> BatchLane:
        return BatchLane(
            self._identity.worker,
            limits.batch_max_deliver,
            intake,
            self._engine,
            self._held,
            ResultStore(self._nats, self._clock),
            ProgressRecords(self._nats, self._identity.revision),
            self._nats,
            chat_format=self._model.tokenizer.chat_format,
            sampling_defaults=self._model.directory.sampling_defaults,
            clock=self._clock,
            receipts=receipts,
        )

    @property
    def stats(self) -> EngineStats:
        """The engine's state after its last step."""
        return self._engine.stats

    async def start(self) -> None:
        """Start the engine, wait for the queue, take requests; `ConfigError` (adapters) or `DependencyError` (NATS)."""
        self._follow_group()
        self._engine.start(self._relay.deliver)
        await self._service.start()
        await self._adapters.start()
        await self._clock.synchronize(self._nats)
        self._tasks.every(SYNCHRONIZE_INTERVAL_S, partial(self._clock.synchronize, self._nats), "time of NATS")
        await self.consumer.start()
        if self._golden is not None:
            await self._golden.start()
            self._tasks.every(TICK_S, self._golden.tick, "golden probes")

    async def close(self) -> None:
        """Stop the engine and everything else; requests still held are left to the queue."""
        await self.consumer.close()
        if self._group is not None:
            self._group.group.stop_forming()
        # In a thread, because the engine may be waiting for this loop.
        await asyncio.to_thread(self._engine.stop)
        if self._group is not None:
            await asyncio.to_thread(self._group.group.close)
        self._encoder.close()
        await self._constraints.close()
        if self._images is not None:
            await self._images.close()
        await self._adapters.close()


def _processor(setup: EngineSetup) -> MediaProcessor | None:
    if setup.media is not None and not can_decode():
        _log.warning("Pillow is not installed, so no images are read: pip install 'headrace[worker]'")
        return None
    return setup.media


def _readings(setup: EngineSetup) -> Readings:
    tiers = tuple if setup.tiers is None else setup.tiers.readings
    ranks = tuple if setup.group is None else setup.group.group.readings
    return Readings(GpuMonitor(setup.gpu_uuid), setup.experts, ranks, tiers)


def _images(
    nats: DirectClient, processor: MediaProcessor | None, max_model_len: int, max_bytes: int
) -> RequestImages | None:
    if processor is None:
        return None
    return RequestImages(processor, PreparedImages(MediaStore(nats.jetstream()), processor, max_bytes), max_model_len)
