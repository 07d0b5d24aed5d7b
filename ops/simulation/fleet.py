"""Workers and their queue in virtual time. Every run of one load and seed is the same.

The queue delivers messages as NATS does: in order, returned ones first, to the workers with waiting pulls, in
turn. Messages between workers take `LATENCY_S`, and may be lost.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable

from gpu_worker.consumer.prefixes.messages import PeerMessage
from gpu_worker.consumer.pull_queue import PULL_EXPIRES_S
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.simulation.engine import TimedRunner, VirtualClock
from ops.simulation.outcome import Job, TokenGaps
from ops.simulation.step_time import StepTimes
from ops.simulation.tiers import SharedFiles, TierSizes, VirtualTiers
from ops.simulation.worker import VirtualWorker

LATENCY_S = 0.0003
DEATH_S = 1.0
"""Time until a gateway notices a death and republishes the lost requests."""


class VirtualFleet:
    """Owns the queue and the workers.

    Attributes:
        clock: The time.
        is_affine: Workers wait for the holders of prefixes; else each pulls by itself.
        is_lost: Returns whether a message, given as an announcement or the name of its type, is lost.
        jobs: Requests that have not ended, by their number in the queue.
        gaps: Times between tokens.
    """

    def __init__(
        self,
        num_workers: int,
        config: SchedulerConfig,
        times: StepTimes,
        *,
        is_affine: bool = False,
        is_lost: Callable[[str], bool] = lambda what: False,
        seed: int = 0,
        tiers: TierSizes | None = None,
    ) -> None:
        """Start workers; `seed` is of how steps differ from their prediction."""
        self.clock = VirtualClock()
        self.is_lost = is_lost
        self.is_affine = is_affine
        self.gaps = TokenGaps()
        self.jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._queue: deque[int] = deque()
        self._pulling: deque[VirtualWorker] = deque()
        self._config, self._times, self._tiers = config, times, tiers
        if tiers is not None:
            self._files = SharedFiles(tiers.file_blocks, config.retained_share, self.clock)
        self._factors, self._draw = times.spread.factors(seed), random.Random(f"workers/{seed}")
        self.workers: list[VirtualWorker] = []
        self._by_name: dict[str, VirtualWorker] = {}
        for _ in range(num_workers):
            self._add_worker()
        self._pull_again()
        if is_affine:
            for worker in self.workers:
                worker.beat()

    @property
    def now(self) -> float:
        """The time in seconds."""
        return self.clock.now

    @property
    def num_queued(self) -> int:
        """Requests that no worker has taken."""
        return len(self._queue)

    def _add_worker(self) -> None:
        name = f"w{len(self.workers)}"
        runner = TimedRunner(self._times, self.clock, self._factors, self._draw.randrange(1 << 16))
        tiers = None
        if self._tiers is not None:
            tiers = VirtualTiers(self._tiers, self._config.retained_share, self._files, self.clock)
        worker = VirtualWorker(name, self, self._config, runner, tiers)
        self.workers.append(worker)
        self._by_name[name] = worker

    def submit(self, job: Job) -> None:
        """Put a request into the queue."""
        job.number = next(self._numbers)
        job.sent_at = self.now
        self.jobs[job.number] = job
        self._queue.append(job.number)
        self.hand_out()

    def give_back(self, number: int) -> None:
        """Deliver a request again, before all others."""
        if number in self.jobs:
            self._queue.appendleft(number)
            self.hand_out()

    def move(self, job: Job) -> None:
        """Deliver a request of a dead worker again, once that is noticed."""

        def noticed() -> None:
            job.note_loss()
            self.give_back(job.number)

        self.clock.call_later(DEATH_S, noticed)

    def pull(self, worker: VirtualWorker) -> None:
        """Let a worker that may have room wait for requests, behind those that wait already."""
        if not worker.is_pulling:
            worker.is_pulling = True
            self._pulling.append(worker)
        self.hand_out()

    def hand_out(self) -> None:
        """Deliver what waits to the workers with room, in turn."""
        queue, pulling = self._queue, self._pulling
        while queue and pulling:
            worker = pulling.popleft()
            if not worker.is_alive or worker.capacity.interactive(len(queue)) <= 0:
                worker.is_pulling = False
                continue
            pulling.append(worker)
            job = self.jobs.get(queue.popleft())
            if job is not None:
                worker.take(self._delivery(job), job)

    def send(self, receiver: str, message: PeerMessage) -> None:
        """Bring a message from one worker to another."""
        worker = self._by_name.get(receiver)
        if worker is not None and not self.is_lost(type(message).__name__):
            self.clock.call_later(LATENCY_S, lambda: worker.receive(message))

    def _pull_again(self) -> None:
        """Let every worker look at its room again, as pulls end and are made again."""
        for worker in self.workers:
            if not worker.is_pulling and worker.is_alive:
                worker.is_pulling = True
                self._pulling.append(worker)
        self.hand_out()
        self.clock.call_later(PULL_EXPIRES_S, self._pull_again)

    def _delivery(self, job: Job) -> QueuedMessage:
        ack = ""
        if self.is_affine:
            # A grant hands the message on to another worker, which reads all of it from there.
            ack = f"$JS.ACK.stream.consumer.1.{job.number}.1.{round(job.sent_at * 1e9)}.{len(self._queue)}"
        return QueuedMessage("", b"", ack, job.number, 1, len(self._queue), job.sent_at)
