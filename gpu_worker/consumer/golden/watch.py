"""Decides what follows from golden probes: a worker that fails twice in a row takes nothing more, and says why.

By default a worker withdraws only while another one takes requests and has passed its own last probe. Otherwise a
wrong baseline would leave the model without any worker, and a model that is a little off is worth more than none.
Until there is another, it reports what it found and serves on. Heartbeats of other workers are kept undecoded until a
decision needs them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
from nats.aio.msg import Msg

from gpu_worker.consumer.consumer import Consumer
from gpu_worker.consumer.golden.prober import GoldenProber, ProbedEngine, ProbeSizes
from gpu_worker.consumer.heartbeat import HeartbeatSource
from gpu_worker.engine.engine_thread import StepOutcome
from shared.bounds import PeerName
from shared.direct_client import DirectClient
from shared.golden import Baseline, GoldenReading
from shared.messages import UNDECODABLE
from shared.subjects import workers_filter
from shared.worker_metrics import WorkerMetrics

TICK_S = 1.0
FAILURES_TO_WITHDRAW = 2
HEARD_S = 2.0
_MAX_PEERS = 1024

WithdrawRule = Literal["unless-last", "always", "never"]

_log = logging.getLogger(__name__)


class _Peer(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The part of `Heartbeat` that a decision needs."""

    worker: PeerName
    draining: bool = False
    metrics: WorkerMetrics | None = None


_decode_peer = msgspec.msgpack.Decoder(_Peer).decode


@dataclass(frozen=True, slots=True)
class GoldenSettings:
    """What a worker is to do: compare with what, in which share of the device's time, and withdraw when."""

    baseline: Baseline
    share: float
    withdraw: WithdrawRule


class GoldenWatch:
    """One worker's golden probes, and what follows from them."""

    def __init__(
        self,
        settings: GoldenSettings,
        nats: DirectClient,
        engine: ProbedEngine,
        consumer: Consumer,
        source: HeartbeatSource,
        sizes: ProbeSizes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch a worker; see `GoldenProber` for the sizes."""
        self._settings = settings
        self._nats = nats
        self._consumer = consumer
        self._source = source
        self._clock = clock
        self._peers: dict[str, tuple[float, bytes]] = {}
        self._problem = ""
        self.has_withdrawn = False
        self._is_overruled = False
        # From the first heartbeat on: others may not take a worker for sound that has not been probed.
        source.golden = self.reading
        self._prober = GoldenProber(engine, settings.baseline, settings.share, clock, sizes, self._decide)
        if not self._prober.has_prompts:
            _log.warning("no golden prompt fits into %d tokens: the worker is not probed", sizes.max_num_tokens)

    async def start(self) -> None:
        """Listen to the other workers."""
        await self._nats.subscribe(workers_filter(self._source.model), cb=self._receive)

    async def tick(self) -> None:
        """Begin a probe where one is due, and look again whether to withdraw. Called every `TICK_S`."""
        is_away = self._consumer.withdrawn is not None or self._source.is_draining
        self._note_uncordoned()
        self._prober.tick(may_begin=not (is_away or self._source.held.has_suspect))
        if self._problem and not self.has_withdrawn:
            self._decide()

    def accept(self, outcome: StepOutcome) -> None:
        """Pass on what a step did; events of probes are not the consumer's."""
        for event in outcome.events:
            self._prober.take(event)
        self._consumer.accept(outcome)

    def reading(self) -> GoldenReading:
        """Return what heartbeats say."""
        prober = self._prober
        return GoldenReading(
            probes=prober.num_probes,
            failed=prober.num_failed,
            in_a_row=prober.in_a_row,
            deviation=prober.deviation,
            limit=prober.limit,
            device_s=prober.device_s,
            given_up=prober.num_given_up,
            has_withdrawn=self.has_withdrawn,
            problem=self._problem,
            age_s=prober.age_s,
        )

    def _note_uncordoned(self) -> None:
        """Let an operator have the last word: who uncordons a worker that fails has it serve until a probe passes."""
        if self.has_withdrawn and not self._source.is_withdrawn:
            self.has_withdrawn = False
            self._is_overruled = True

    def _decide(self) -> None:
        prober = self._prober
        if not prober.in_a_row:
            self._is_overruled = False
            # A withdrawn worker stays so until an operator has looked: an intermittent fault is a fault.
            if not self.has_withdrawn:
                self._problem = ""
            return
        if prober.in_a_row < FAILURES_TO_WITHDRAW or self.has_withdrawn:
            return
        is_new, baseline = not self._problem, self._settings.baseline
        of = f"{baseline.model} {baseline.label}".strip()
        reason = f"{prober.in_a_row} golden probes in a row differ from {of[:128]}: {prober.deviation:.3g}, limit "
        self._problem = f"{reason}{prober.limit:.3g}"
        if self._is_overruled:
            return
        if self._may_withdraw():
            self.has_withdrawn = True
            self._consumer.cordon()
            _log.error("this worker withdraws: %s", self._problem)
        elif is_new:
            _log.error("this worker goes on (--golden-withdraw %s): %s", self._settings.withdraw, self._problem)

    def _may_withdraw(self) -> bool:
        rule = self._settings.withdraw
        return rule == "always" or (rule == "unless-last" and any(map(self._is_sound, self._peers.values())))

    def _is_sound(self, heard: tuple[float, bytes]) -> bool:
        """Whether another worker takes requests, and has passed its last probe or has no baseline.

        One that has not been probed yet may fail as well: that is waited for.
        """
        if self._clock() - heard[0] > HEARD_S:
            return False
        try:
            peer = _decode_peer(heard[1])
        except UNDECODABLE:
            return False
        golden = None if peer.metrics is None else peer.metrics.golden
        has_passed = golden is None or (golden.probes > 0 and golden.in_a_row == 0)
        return peer.worker != self._source.worker and not peer.draining and has_passed

    async def _receive(self, message: Msg) -> None:
        now = self._clock()
        if message.subject not in self._peers and len(self._peers) >= _MAX_PEERS:
            self._peers = {name: peer for name, peer in self._peers.items() if now - peer[0] <= HEARD_S}
        if len(self._peers) < _MAX_PEERS or message.subject in self._peers:
            self._peers[message.subject] = (now, message.data)
