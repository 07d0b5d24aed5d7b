"""The worker's heartbeat, by which gateways judge its life and its load, and the counts that it carries."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from gpu_worker.adapters.slots import AdapterSlots
from gpu_worker.consumer.batch_queues import BatchQueues
from gpu_worker.consumer.gpu_monitor import GpuMonitor
from gpu_worker.consumer.handover import KvHandover
from gpu_worker.consumer.held_request import HeldRequests
from gpu_worker.consumer.interactive_queues import InteractiveQueues
from gpu_worker.consumer.peer_services import PeerServices
from gpu_worker.consumer.prefixes.affinity import PrefixAffinity
from gpu_worker.consumer.result_store import ResultStore
from gpu_worker.engine.engine_thread import EngineThread
from shared.adapter_calls import AdapterBeat, pack_residents
from shared.disaggregation import RoleNews
from shared.features import FEATURES
from shared.golden import GoldenReading
from shared.messages import Heartbeat
from shared.pooling import Task
from shared.process_usage import resident_bytes
from shared.sampling import SamplingDefaults
from shared.worker_metrics import KvGroup, KvTierReading, RankReading, WorkerMetrics

if TYPE_CHECKING:
    from gpu_worker.layers.mixture import ExpertLoad, ExpertLoads

INTERVAL_S = 0.2


# Heartbeats are more frequent than metrics are read.
REFRESH_S = 0.5


@dataclass(slots=True)
class HeartbeatSource:
    """Makes heartbeats from the state of engine and lanes.

    Attributes:
        adapters, named_adapters: Those in memory, and the names that this worker has given.
        is_withdrawn: Say so too, for as long as the engine cannot compute or the worker is cordoned.
        num_reconnects: How often the connection to NATS was made again.
        started: When this worker began, or came back to life last, in Unix seconds.
        earlier_lives: The times of `started` before.
        golden: Reads what golden probes have found; None without a baseline.
        services: What others tell of the service that tenants have had.
        handover: The worker's part in computing prompts and answers on different workers; None: it does both.
    """

    worker: str
    model: str
    revision: str
    engine: EngineThread
    held: HeldRequests
    block_size: int
    max_model_len: int
    affinity: PrefixAffinity
    max_prompt_characters: int = 0
    tasks: tuple[Task, ...] = ("generate",)
    chat_format: str = ""
    sampling_defaults: SamplingDefaults | None = None
    features: tuple[str, ...] = FEATURES
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    named_adapters: Callable[[], tuple[AdapterBeat, ...]] = tuple
    is_draining: bool = False
    is_withdrawn: bool = False
    num_reconnects: int = 0
    started: float = field(default_factory=time.time)
    earlier_lives: list[float] = field(default_factory=list)
    golden: Callable[[], GoldenReading | None] = lambda: None
    handover: KvHandover | None = None
    services: PeerServices = field(init=False)

    def __post_init__(self) -> None:
        self.services = PeerServices(self.model, time.monotonic())

    def begin_life(self) -> None:
        """Count as another process from now on: what the worker held was lost."""
        self.earlier_lives.append(self.started)
        self.started = time.time()

    def is_second(self, other: Heartbeat) -> bool:
        """Whether a worker that calls itself by this one's name was there before, as its heartbeat says."""
        is_earlier = (other.started, other.pid) < (self.started, os.getpid())
        return is_earlier and not (other.pid == os.getpid() and other.started in self.earlier_lives)

    def heartbeat(self, queues: InteractiveQueues, metrics: WorkerMetrics | None = None) -> Heartbeat:
        """Return the state of this moment. Prompts that are being encoded, unknown to the engine yet, wait too."""
        stats = self.engine.stats
        self.engine.exchange_services(self.services.take())
        return Heartbeat(
            worker=self.worker,
            model=self.model,
            step=stats.step,
            running=stats.running,
            waiting=stats.waiting + sum(held.sequence is None for held in self.held),
            waiting_tokens=stats.waiting_tokens,
            free_blocks=stats.free_blocks,
            total_blocks=stats.total_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=stats.max_num_seqs,
            prefill_rate=stats.prefill_rate,
            decode_rate=stats.decode_rate,
            queue_pending=queues.backlog,
            knows_queue=queues.knows_backlog,
            draining=self.is_draining or self.is_withdrawn,
            pid=os.getpid(),
            started=self.started,
            revision=self.revision,
            spec_decode_num_drafts=stats.spec_decode_num_drafts,
            spec_decode_num_draft_tokens=stats.spec_decode_num_draft_tokens,
            spec_decode_num_accepted_tokens=stats.spec_decode_num_accepted_tokens,
            **queues.numbers,
            max_prompt_characters=self.max_prompt_characters,
            tasks=self.tasks,
            chat_format=self.chat_format,
            metrics=self._with_golden(metrics),
            sampling_defaults=self.sampling_defaults,
            num_reconnects=self.num_reconnects,
            features=self.features,
            prefixes=self.affinity.news(),
            services=self.engine.services,
            adapters=self.named_adapters(),
            resident_adapters=pack_residents(self.adapters.residents),
            roles=self._roles(queues),
            is_ending=self.is_draining,
        )

    def _roles(self, queues: InteractiveQueues) -> RoleNews | None:
        if self.handover is None:
            return None
        return self.handover.news(
            is_withdrawn=self.is_draining or self.is_withdrawn,
            last_ready=queues.ready.last_pulled,
            last_ready_returned=queues.ready.last_returned,
        )

    def _with_golden(self, metrics: WorkerMetrics | None) -> WorkerMetrics | None:
        golden = self.golden()
        return metrics if metrics is None or golden is None else structs.replace(metrics, golden=golden)


@dataclass(frozen=True, slots=True)
class Readings:
    """Sources of the metrics of the worker's device and engine."""

    gpu: GpuMonitor
    experts: ExpertLoads | None = None
    ranks: Callable[[], tuple[RankReading, ...]] = tuple
    tiers: Callable[[], tuple[KvTierReading, ...]] = tuple


@dataclass(eq=False)
class MetricsSource:
    """Reads the counts of engine, queues and process. Keeps the last reading for a moment; counts nothing itself."""

    _engine: EngineThread
    _interactive: InteractiveQueues
    _batch: BatchQueues
    _results: ResultStore
    _readings: Readings
    _expert_load: ExpertLoad | None = field(init=False)
    _metrics: WorkerMetrics | None = None
    _read_at: float = 0.0

    def __post_init__(self) -> None:
        self._expert_load = None if self._readings.experts is None else self._readings.experts.read()

    def metrics(self) -> WorkerMetrics:
        """Return the counts, at most `REFRESH_S` old."""
        now = time.monotonic()
        if self._metrics is None or now - self._read_at >= REFRESH_S:
            self._metrics, self._read_at = self._read(), now
        return self._metrics

    async def refresh(self) -> None:
        """Read what waits for a device, in a thread: the GPU's sensors, and how tokens fall on experts."""
        await self._readings.gpu.refresh()
        if self._readings.experts is not None:
            self._expert_load = await asyncio.to_thread(self._readings.experts.read)

    def _read(self) -> WorkerMetrics:
        stats, batch = self._engine.stats, self._batch
        experts = self._expert_load
        return WorkerMetrics(
            prompt_tokens=stats.num_prefix_queries,
            prefix_hits=stats.num_prefix_hits,
            preemptions=stats.num_preemptions,
            failed_steps=stats.num_failed_steps,
            running_batch=stats.running_batch,
            waiting_batch=stats.waiting_batch,
            batch_pending=batch.backlog,
            batch_oldest_s=batch.oldest_s,
            redelivered_interactive=self._interactive.num_redelivered,
            redelivered_batch=batch.num_redelivered,
            dead_letters=self._results.num_dead_letters,
            cpu_seconds=time.process_time(),
            resident_bytes=resident_bytes(),
            gpus=self._readings.gpu.readings,
            kv_groups=tuple(KvGroup(*group) for group in stats.groups),
            expert_tokens=0 if experts is None else experts.tokens,
            expert_imbalance=0.0 if experts is None else experts.imbalance,
            unused_experts=0 if experts is None else experts.unused,
            evicted_blocks=stats.num_evicted_blocks,
            ranks=self._readings.ranks(),
            kv_tiers=self._readings.tiers(),
            device_hits=stats.num_device_hits,
            retained_blocks=stats.num_retained_blocks,
            **self._engine.counts.fields(),
        )
