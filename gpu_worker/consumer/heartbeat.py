"""The worker's heartbeat: what gateways judge its life and its load by."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from gpu_worker.consumer.held_request import HeldRequests
from gpu_worker.consumer.interactive_queues import InteractiveQueues
from gpu_worker.engine.engine_thread import EngineThread
from shared.messages import FEATURES, Heartbeat
from shared.pooling import Task
from shared.sampling import SamplingDefaults
from shared.worker_metrics import WorkerMetrics

INTERVAL_S = 0.2


@dataclass(slots=True)
class HeartbeatSource:
    """Makes heartbeats from the state of engine and lanes.

    Attributes:
        is_draining: Say that no new requests are taken.
        num_reconnects: How often the connection to NATS was made again.
    """

    worker: str
    model: str
    revision: str
    engine: EngineThread
    held: HeldRequests
    block_size: int
    max_model_len: int
    max_prompt_characters: int = 0
    tasks: tuple[Task, ...] = ("generate",)
    chat_format: str = ""
    sampling_defaults: SamplingDefaults | None = None
    is_draining: bool = False
    num_reconnects: int = 0
    started: float = field(default_factory=time.time)

    def heartbeat(self, queues: InteractiveQueues, metrics: WorkerMetrics | None = None) -> Heartbeat:
        """Return the state of this moment.

        Args:
            queues: Where interactive requests come from.
            metrics: What the worker counts of itself.
        """
        stats = self.engine.stats
        # Prompts that are being encoded wait as much as those in the engine, which does not know them yet.
        num_encoding = sum(held.sequence is None for held in self.held)
        return Heartbeat(
            worker=self.worker,
            model=self.model,
            step=stats.step,
            running=stats.running,
            waiting=stats.waiting + num_encoding,
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
            draining=self.is_draining,
            pid=os.getpid(),
            started=self.started,
            revision=self.revision,
            spec_decode_num_drafts=stats.spec_decode_num_drafts,
            spec_decode_num_draft_tokens=stats.spec_decode_num_draft_tokens,
            spec_decode_num_accepted_tokens=stats.spec_decode_num_accepted_tokens,
            last_pulled=queues.new.last_pulled,
            last_returned=queues.new.last_returned,
            last_resumed=queues.resumed.last_pulled,
            last_resumed_returned=queues.resumed.last_returned,
            max_prompt_characters=self.max_prompt_characters,
            tasks=self.tasks,
            chat_format=self.chat_format,
            metrics=metrics,
            sampling_defaults=self.sampling_defaults,
            num_reconnects=self.num_reconnects,
            features=FEATURES,
        )
