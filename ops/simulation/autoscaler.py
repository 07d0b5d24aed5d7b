"""An autoscaler in virtual time: it does what Kubernetes' does with the need for workers that a gateway tells."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.fleet.worker_needs import SAMPLE_INTERVAL_S, ModelNeed, Need, WorkerSample
from ops.simulation.gateway import VirtualGateway
from ops.simulation.worker import VirtualWorker


@dataclass(frozen=True, slots=True)
class Scaling:
    """How an autoscaler follows the need; the defaults are those of `ops/deploy/kubernetes/overlays/keda`.

    Attributes:
        most: Workers at most; at least one stays.
        start_s: Until a worker that is started takes requests.
        every_s: Seconds between two looks at the need.
        leave_every_s: Seconds between two workers that drain.
    """

    most: int
    start_s: float = 60.0
    every_s: float = 10.0
    leave_every_s: float = 120.0


class Autoscaler:
    """Starts and drains the workers of a virtual fleet. It begins at once, and goes on for as long as the fleet."""

    def __init__(self, gateway: VirtualGateway, scaling: Scaling, ttft_slo_s: float) -> None:
        self._gateway = gateway
        self._fleet = gateway.fleet
        self._scaling = scaling
        self._need = ModelNeed(ttft_slo_s, GatewayConfig().batch_drain_s)
        self._num_starting = 0
        self._left_at = 0.0
        self._fleet.clock.call_later(SAMPLE_INTERVAL_S, self._look)
        self._latest: Need | None = None
        self._fleet.clock.call_later(scaling.every_s, self._scale)

    def _taking(self) -> list[VirtualWorker]:
        return [worker for worker in self._fleet.workers if worker.takes_requests]

    def _look(self) -> None:
        gateway, samples = self._gateway, [_sample(worker) for worker in self._taking()]
        self._latest = self._need.look(self._fleet.now, gateway.present_load, samples, gateway.outlook(), 0)
        self._fleet.clock.call_later(SAMPLE_INTERVAL_S, self._look)

    def _scale(self) -> None:
        self._fleet.clock.call_later(self._scaling.every_s, self._scale)
        taking = self._taking()
        if self._latest is None:
            return
        wanted = min(self._scaling.most, self._latest.needed)
        missing = wanted - len(taking) - self._num_starting
        for _ in range(missing):
            self._num_starting += 1
            self._fleet.clock.call_later(self._scaling.start_s, self._begin)
        now = self._fleet.now
        if missing < 0 and len(taking) > 1 and now - self._left_at >= self._scaling.leave_every_s:
            self._left_at = now
            taking[-1].drain()

    def _begin(self) -> None:
        self._num_starting -= 1
        self._fleet.start_worker()


def _sample(worker: VirtualWorker) -> WorkerSample:
    stats, counts = worker.engine.stats, worker.engine.counts
    return WorkerSample(
        worker.name,
        stats.running,
        0,
        stats.max_num_seqs,
        counts.prefill_tokens,
        worker.num_tokens,
        stats.prefill_rate,
        stats.decode_rate,
    )
