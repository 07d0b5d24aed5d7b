"""The workers and the other gateways, as their heartbeats show them: who is alive, what is queued, how fast it drains.

Owns the view; nobody else writes it. A worker is dead when it has been silent for four heartbeats, or when its step
counter stands still although it has work, whatever its connection says. While this gateway itself cannot hear (its NATS
connection is down, or its own process was starved), nobody is declared dead.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.load import FleetLoad
from shared.messages import GatewayHeartbeat, Heartbeat

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """When a peer counts as dead. Times are seconds.

    Attributes:
        silence_s: Silence of a worker: four missed heartbeats.
        stall_s: Time for which a worker's step counter may stand still while it has work.
        hearing_grace_s: Time after this gateway could not hear during which nobody is declared dead.
        gateway_silence_s: Silence after which another gateway's queue no longer counts.
    """

    silence_s: float = 1.0
    stall_s: float = 10.0
    hearing_grace_s: float = 1.5
    gateway_silence_s: float = 5.0


@dataclass(slots=True)
class _WorkerView:
    heartbeat: Heartbeat
    seen_at: float
    stepped_at: float
    is_stalled: bool = False


class Fleet:
    """All live workers and gateways.

    Attributes:
        on_dead: Called with a worker's name when it is found dead.
    """

    def __init__(self, gateway: str, limits: FleetLimits, unshown: Callable[[str], tuple[int, int]]) -> None:
        """Start empty. `unshown` gives this gateway's requests of a model that no heartbeat shows, and their tokens."""
        self._gateway = gateway
        self._limits = limits
        self._unshown = unshown
        self._workers: dict[str, _WorkerView] = {}
        self._known_models: set[str] = set()
        # Sums of the heartbeats, until the next one changes them: the hot path asks once per request.
        self._loads: dict[str, FleetLoad] = {}
        self._gateways: dict[str, tuple[GatewayHeartbeat, float]] = {}
        self._is_deaf = False
        self._judge_after = 0.0
        self._last_sweep: float | None = None
        self.on_dead: Callable[[str], None] = lambda worker: None

    def hear(self, heartbeat: Heartbeat, now: float) -> None:
        """Take in a worker's heartbeat. `now` is loop time, here and below."""
        self._loads.clear()
        view = self._workers.get(heartbeat.worker)
        if view is None or view.heartbeat.started != heartbeat.started:
            if view is not None:
                self._declare_dead(heartbeat.worker, "it was restarted")
            self._workers[heartbeat.worker] = _WorkerView(heartbeat, now, now)
            self._known_models.add(heartbeat.model)
            return
        if heartbeat.step != view.heartbeat.step or heartbeat.running == 0:
            view.stepped_at = now
            view.is_stalled = False
        view.heartbeat = heartbeat
        view.seen_at = now

    def hear_gateway(self, heartbeat: GatewayHeartbeat, now: float) -> None:
        """Take in another gateway's heartbeat."""
        if heartbeat.gateway != self._gateway:
            self._loads.clear()
            self._gateways[heartbeat.gateway] = (heartbeat, now)

    def lose_hearing(self) -> None:
        """Stop judging: the connection over which heartbeats come is down."""
        self._is_deaf = True

    def regain_hearing(self, now: float) -> None:
        """Judge again, after a grace period in which everybody can be heard."""
        self._is_deaf = False
        self._judge_after = now + self._limits.hearing_grace_s

    def sweep(self, now: float) -> None:
        """Find the dead. Called several times in `silence_s`."""
        last, self._last_sweep = self._last_sweep, now
        if last is not None and now - last > self._limits.silence_s / 2:
            # This process did not run for a while: heartbeats may wait unread, so silence proves nothing.
            self.regain_hearing(now)
        if self._is_deaf or now < self._judge_after:
            return
        self._loads.clear()
        for name, view in list(self._workers.items()):
            if now - view.seen_at > self._limits.silence_s:
                del self._workers[name]
                self._declare_dead(name, f"it was silent for {now - view.seen_at:.2f} s")
            elif not view.is_stalled and now - view.stepped_at > self._limits.stall_s:
                view.is_stalled = True
                self._declare_dead(name, f"it has work but made no step for {now - view.stepped_at:.1f} s")
        for name, (_, seen_at) in list(self._gateways.items()):
            if now - seen_at > self._limits.gateway_silence_s:
                del self._gateways[name]

    def is_gone(self, worker: str) -> bool:
        """Whether a worker is known to be dead, or not known although it could be heard."""
        view = self._workers.get(worker)
        can_judge = not self._is_deaf and self._last_sweep is not None and self._last_sweep >= self._judge_after
        return can_judge and (view is None or view.is_stalled)

    def models(self) -> list[str]:
        """Return the models that live workers serve, sorted."""
        return sorted({heartbeat.model for heartbeat in self._live()})

    def is_ready(self, model: str | None = None) -> bool:
        """Whether a live worker takes new requests of a model, or of any."""
        return any(model in (None, h.model) and not h.draining for h in self._live())

    def load(self, model: str) -> FleetLoad | None:
        """Return the sums over a model's workers that take new requests; None for a model nobody has heard of.

        While no worker at all can be heard, no model is unknown: it has no workers.
        """
        load = self._loads.get(model)
        if load is None:
            workers = [h for h in self._live() if h.model == model and not h.draining]
            if not workers and model not in self._known_models and any(True for _ in self._live()):
                return None
            load = self._loads[model] = _sum(model, workers, [heartbeat for heartbeat, _ in self._gateways.values()])
        own_requests, own_tokens = self._unshown(model)
        if own_requests == 0:
            return load
        return dataclasses.replace(
            load,
            queued_requests=load.queued_requests + own_requests,
            queued_tokens=load.queued_tokens + own_tokens,
        )

    def can_claim(self, model: str) -> bool:
        """Whether some worker of a model has room and sees an empty queue: what still waits then is lost."""
        return any(
            h.queue_pending == 0 and h.waiting == 0 and h.running < h.max_num_seqs
            for h in self._live()
            if h.model == model and not h.draining
        )

    def _live(self) -> Iterable[Heartbeat]:
        return (view.heartbeat for view in self._workers.values() if not view.is_stalled)

    def _declare_dead(self, worker: str, why: str) -> None:
        _logger.warning("worker %s is dead: %s", worker, why)
        self.on_dead(worker)


def _sum(model: str, workers: list[Heartbeat], gateways: list[GatewayHeartbeat]) -> FleetLoad:
    return FleetLoad(
        model=model,
        num_workers=len(workers),
        running=sum(h.running for h in workers),
        queued_requests=sum(h.waiting for h in workers) + sum(g.unclaimed for g in gateways),
        queued_tokens=sum(h.waiting_tokens for h in workers) + sum(g.unclaimed_tokens for g in gateways),
        prefill_rate=sum(h.prefill_rate for h in workers),
        decode_rate=sum(h.decode_rate for h in workers),
        free_blocks=sum(h.free_blocks for h in workers),
        total_blocks=sum(h.total_blocks for h in workers),
        block_size=max((h.block_size for h in workers), default=1),
        max_model_len=min((h.max_model_len for h in workers), default=0),
        free_slots=sum(max(0, h.max_num_seqs - h.running) for h in workers),
        revisions=tuple(sorted({h.revision for h in workers})),
        spec_decode_num_drafts=sum(h.spec_decode_num_drafts for h in workers),
        spec_decode_num_draft_tokens=sum(h.spec_decode_num_draft_tokens for h in workers),
        spec_decode_num_accepted_tokens=sum(h.spec_decode_num_accepted_tokens for h in workers),
    )
