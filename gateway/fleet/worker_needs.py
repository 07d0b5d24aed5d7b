"""How many workers each model needs now, by lane: the figure that autoscalers follow.

The interactive lane needs the workers that are busy with it, so that each is busy `TARGET_UTILIZATION` of the time, and
those that work off the wait of a request that comes now within half of the objective. A worker is as busy as its slots
are taken, or as its tokens per second come to of its measured rates, where that is more. The batch lane needs what its
backlog takes over `batch_drain_s`, jobs being as long as interactive answers.

A need rises at once and falls when it has been lower for `SCALE_DOWN_AFTER_S`. Each gateway process computes it.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Struct

from gateway.fleet.fleet_load import FleetLoad
from shared.messages import Heartbeat
from shared.worker_metrics import WorkerMetrics

TARGET_UTILIZATION = 0.75
TARGET_WAIT_SHARE = 0.5
SCALE_DOWN_AFTER_S = 300.0
SAMPLE_INTERVAL_S = 1.0
# Time constant of how busy workers are: several of the seconds that heartbeats' counts may be old.
_SMOOTHING_S = 10.0
_NOTHING = WorkerMetrics()


class Outlook(Struct, frozen=True):
    """What the forecast says of a fleet: seconds until a request that comes now begins, and between two that end.

    `departure_s` is 0 while the rate is unknown.
    """

    wait_s: float
    departure_s: float


class WorkerSample(Struct, frozen=True):
    """A worker's state. `running` counts interactive sequences; tokens count since its start, rates are per second."""

    worker: str
    running: int
    running_batch: int
    max_num_seqs: int
    prefill_tokens: int
    generation_tokens: int
    prefill_rate: float
    decode_rate: float

    @property
    def is_measured(self) -> bool:
        """Whether a rate of it is known."""
        return self.prefill_rate > 0 or self.decode_rate > 0

    def busy(self, before: WorkerSample, seconds: float) -> float:
        """Return which share of the time since `before` it was busy with interactive requests, at most 1."""
        work_s = 0.0
        if self.decode_rate > 0:
            work_s += max(0, self.generation_tokens - before.generation_tokens) / self.decode_rate
        if self.prefill_rate > 0:
            work_s += max(0, self.prefill_tokens - before.prefill_tokens) / self.prefill_rate
        own_share = self.running / max(1, self.running + self.running_batch)
        return min(1.0, max(self.running / max(1, self.max_num_seqs), own_share * work_s / seconds))


class Need(Struct, frozen=True):
    """How many workers a model needs.

    Attributes:
        workers: Those that take requests now.
        needed: All that are needed; `lanes` says for what, the batch lane what it needs beyond the interactive one.
        busy: Workers that interactive requests keep busy, smoothed.
        predicted_wait_s: Until a request that comes now begins.
        target_wait_s: Up to which that may be.
    """

    workers: int
    needed: int
    lanes: dict[str, int]
    busy: float
    predicted_wait_s: float
    target_wait_s: float


class ModelNeed:
    """One model's need over time. `now` is monotonic, seconds."""

    def __init__(self, ttft_slo_s: float, batch_drain_s: float) -> None:
        self._target_wait_s = TARGET_WAIT_SHARE * ttft_slo_s
        self._batch_drain_s = batch_drain_s
        self._samples: dict[str, WorkerSample] = {}
        self._busy: dict[str, float] = {}
        self._looked_at: float | None = None
        # Needs of both lanes and of the interactive one, each with its time: the largest first, later ones lower.
        self._highest = (deque[tuple[float, float]](), deque[tuple[float, float]]())

    def look(
        self, now: float, load: FleetLoad, samples: Iterable[WorkerSample], outlook: Outlook, num_jobs: int
    ) -> Need:
        """Take in what heartbeats say; `num_jobs` of the batch lane are not finished."""
        latest = {sample.worker: sample for sample in samples}
        self._note_busy(latest, now)
        num_measured = max(1, sum(sample.is_measured for sample in latest.values()))
        busy = sum(self._busy.values())
        # The wait is by the measured workers' rates. More workers than requests that wait would not shorten it.
        backlog = min(outlook.wait_s * num_measured / self._target_wait_s, load.queued_requests)
        interactive = max(1.0, busy / TARGET_UTILIZATION + backlog)
        job_s = outlook.departure_s * num_measured
        batch = num_jobs * job_s / self._batch_drain_s if job_s > 0 else min(1, num_jobs)
        both = self._held(self._highest[0], interactive + batch, now)
        own = self._held(self._highest[1], interactive, now)
        lanes = {"interactive": own, "batch": both - own}
        return Need(load.num_workers, both, lanes, busy, outlook.wait_s, self._target_wait_s)

    def _note_busy(self, latest: dict[str, WorkerSample], now: float) -> None:
        seconds = 0.0 if self._looked_at is None else now - self._looked_at
        kept = math.exp(-seconds / _SMOOTHING_S)
        busy = {}
        for name, sample in latest.items():
            before = self._samples.get(name)
            if before is None or seconds <= 0:
                busy[name] = self._busy.get(name, 0.0)
            else:
                busy[name] = kept * self._busy[name] + (1 - kept) * sample.busy(before, seconds)
        self._samples, self._busy, self._looked_at = latest, busy, now

    def _held(self, highest: deque[tuple[float, float]], need: float, now: float) -> int:
        """Return the largest need of the last `SCALE_DOWN_AFTER_S`, as whole workers."""
        while highest and highest[-1][1] <= need:
            highest.pop()
        highest.append((now, need))
        while highest[0][0] < now - SCALE_DOWN_AFTER_S:
            highest.popleft()
        # What rounding errors add is not a worker.
        return math.ceil(highest[0][1] - 1e-9)


class Models(Struct, frozen=True):
    """Where the needs of all models come from: names, workers' last heartbeats, loads, and the forecast of a load."""

    names: Callable[[], list[str]]
    workers: Callable[[], list[Heartbeat]]
    load: Callable[[str], FleetLoad | None]
    outlook: Callable[[FleetLoad], Outlook]


class WorkerNeeds:
    """The needs of all models that have workers, or had some lately.

    Attributes:
        latest: By model, as last computed.
    """

    def __init__(self, models: Models, ttft_slo_s: float, batch_drain_s: float) -> None:
        self._models = models
        self._settings = ttft_slo_s, batch_drain_s
        self._needs: dict[str, ModelNeed] = {}
        self.latest: dict[str, Need] = {}

    async def watch_forever(self) -> None:
        """Compute them once a second."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            self.look(loop.time())

    def look(self, now: float) -> None:
        """Compute them."""
        beats: defaultdict[str, list[Heartbeat]] = defaultdict(list)
        for beat in self._models.workers():
            if not beat.draining:
                beats[beat.model].append(beat)
        latest = {}
        for model in sorted({*self._models.names(), *self._needs}):
            load = self._models.load(model)
            # Gone for good, or in the hands of NATS, where no model is unknown.
            if load is None:
                self._needs.pop(model, None)
                continue
            need = self._needs.setdefault(model, ModelNeed(*self._settings))
            outlook, num_jobs = self._models.outlook(load), _num_jobs(beats[model])
            latest[model] = need.look(now, load, map(_sample, beats[model]), outlook, num_jobs)
        self.latest = latest

    def shown(self) -> dict[str, Any]:
        """Return them as JSON objects by model."""
        return {model: msgspec.to_builtins(need) for model, need in self.latest.items()}


def _sample(beat: Heartbeat) -> WorkerSample:
    metrics = beat.metrics or _NOTHING
    num_batch = min(beat.running, metrics.running_batch)
    return WorkerSample(
        beat.worker,
        beat.running - num_batch,
        num_batch,
        beat.max_num_seqs,
        metrics.prefill_tokens,
        metrics.generation_tokens,
        beat.prefill_rate,
        beat.decode_rate,
    )


def _num_jobs(beats: list[Heartbeat]) -> int:
    metrics = [beat.metrics or _NOTHING for beat in beats]
    held = sum(each.running_batch + each.waiting_batch for each in metrics)
    # All workers see the same queues.
    return held + max((each.batch_pending for each in metrics), default=0)
