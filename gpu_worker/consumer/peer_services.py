"""The service of tenants that other workers of the model, and gateways, report.

Heartbeats carry sums, so the next one makes up for a lost one. Counting begins with a worker's first heartbeat. A
worker that has just started adopts how far tenants were ahead, once from each sender.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from gpu_worker.consumer.prefixes.peers import PeerBeat
from gpu_worker.core.fleet_service import HeardServices
from shared.bounds import PeerName
from shared.messages import UNDECODABLE, Lane
from shared.services import ServicesOfModels, TenantService

ADOPT_S = 5.0
"""Seconds after its start in which a worker adopts how far tenants are ahead: a gateway is heard each second."""
_MAX_PEERS = 1024
_MAX_TENANTS = 128


class GatewayServiceBeat(Struct, frozen=True, kw_only=True, tag="gateway"):
    """The part of `GatewayHeartbeat` that is about service: what workers have told that are silent now."""

    gateway: PeerName
    services: ServicesOfModels = {}


_decode_gateway_beat = msgspec.msgpack.Decoder(GatewayServiceBeat).decode


class PeerServices:
    """Owns the sums that were heard last. `now` is monotonic seconds."""

    def __init__(self, model: str, started_at: float) -> None:
        self._model = model
        self._adopt_until = started_at + ADOPT_S
        # By worker: the time of its start, and its sums by lane and tenant.
        self._sums: dict[str, tuple[float, dict[tuple[Lane, str], float]]] = {}
        self._served: dict[Lane, dict[str, float]] = {}
        self._ahead: dict[Lane, dict[str, float]] = {}
        self._tellers: set[str] = set()

    def receive_gateway(self, data: bytes, now: float) -> None:
        """Record a gateway's heartbeat while it matters; undecodable messages are dropped."""
        if now < self._adopt_until:
            with contextlib.suppress(*UNDECODABLE):
                self.note_gateway(_decode_gateway_beat(data), now)

    def note(self, beat: PeerBeat, now: float) -> None:
        """Take note of another worker's heartbeat."""
        started, sums = self._sums.pop(beat.worker, (beat.started, None))
        is_known = sums is not None and started == beat.started
        sums = sums if is_known and sums is not None else {}
        for lane, services in beat.services.items():
            for service in services:
                place = lane, service.tenant
                before = sums.pop(place, 0.0 if is_known else service.served)
                sums[place] = service.served
                if service.served > before:
                    told = self._served.setdefault(lane, {})
                    told[service.tenant] = told.get(service.tenant, 0.0) + service.served - before
        while len(sums) > _MAX_TENANTS:
            del sums[next(iter(sums))]
        while len(self._sums) >= _MAX_PEERS:
            del self._sums[next(iter(self._sums))]
        self._sums[beat.worker] = beat.started, sums
        if now < self._adopt_until:
            self._adopt(f"worker {beat.worker}", beat.services)

    def note_gateway(self, beat: GatewayServiceBeat, now: float) -> None:
        """Take note of a gateway's heartbeat."""
        if now < self._adopt_until and (services := beat.services.get(self._model)):
            self._adopt(f"gateway {beat.gateway}", services)

    def take(self) -> dict[Lane, HeardServices]:
        """Return the services heard since the last call."""
        served, self._served = self._served, {}
        ahead, self._ahead = self._ahead, {}
        return {lane: HeardServices(served.get(lane, {}), ahead.get(lane, {})) for lane in served.keys() | ahead.keys()}

    def _adopt(self, teller: str, services: Mapping[Lane, Iterable[TenantService]]) -> None:
        if not services or teller in self._tellers or len(self._tellers) >= _MAX_PEERS:
            return
        self._tellers.add(teller)
        for lane, several in services.items():
            ahead = self._ahead.setdefault(lane, {})
            for service in several:
                ahead[service.tenant] = max(service.ahead, ahead.get(service.tenant, 0.0))
