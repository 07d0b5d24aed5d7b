"""Takes in the heartbeats of workers, of other gateways and of hosts, and drops other messages.

NATS may let each process publish on its own subject only, so the subject is the identity: a heartbeat that names
another process is dropped, because it would keep a dead worker alive or hide a live one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
from nats.aio.msg import Msg

from gateway.fleet.fleet import MAX_WORKERS, Fleet
from shared.direct_client import DirectClient
from shared.errors import InvalidNameError
from shared.hosted_models import HostBeat
from shared.log_limit import LogLimit
from shared.messages import UNDECODABLE, GatewayHeartbeat, Heartbeat
from shared.subjects import ALL_GATEWAYS, ALL_HOSTS, ALL_WORKERS, gateway_subject, host_subject, worker_subject

MAX_NAMES = 10_000

Beat = TypeVar("Beat", Heartbeat, GatewayHeartbeat, HostBeat)

_logger = logging.getLogger(__name__)


class HeartbeatReceiver:
    """Feeds the fleet."""

    def __init__(self, fleet: Fleet, on_worker: Callable[[str, str], None]) -> None:
        self._fleet = fleet
        self._on_worker = on_worker
        self._loop = asyncio.get_running_loop()
        self._log_limit = LogLimit(_logger)
        # By model and worker: encoding names for each heartbeat would be most of its cost.
        self._subjects: dict[tuple[str, str], str] = {}
        self._decode_worker = msgspec.msgpack.Decoder(Heartbeat).decode
        self._decode_gateway = msgspec.msgpack.Decoder(GatewayHeartbeat).decode
        self._decode_host = msgspec.msgpack.Decoder(HostBeat).decode

    async def start(self, nats: DirectClient) -> None:
        """Begin to listen."""
        await nats.subscribe_direct(ALL_WORKERS, self._receive_worker)
        await nats.subscribe_direct(ALL_GATEWAYS, self._receive_gateway)
        await nats.subscribe_direct(ALL_HOSTS, self._receive_host)

    def _receive_worker(self, message: Msg) -> None:
        heartbeat = self._read(message, self._decode_worker, self._worker_subject)
        if heartbeat is None:
            return
        if self._fleet.serves_another(heartbeat.worker, heartbeat.model):
            self._drop(message, f"a worker {heartbeat.worker!r} whose heartbeats come serves another model")
        elif not self._fleet.has_room_for(heartbeat.worker):
            self._drop(message, f"there are {MAX_WORKERS} workers already")
        else:
            self._on_worker(heartbeat.model, heartbeat.worker)
            self._fleet.note_heartbeat(heartbeat, self._loop.time())

    def _receive_gateway(self, message: Msg) -> None:
        heartbeat = self._read(message, self._decode_gateway, lambda beat: gateway_subject(beat.gateway))
        if heartbeat is not None:
            self._fleet.note_gateway_heartbeat(heartbeat, self._loop.time())

    def _receive_host(self, message: Msg) -> None:
        heartbeat = self._read(message, self._decode_host, lambda beat: host_subject(beat.host))
        if heartbeat is not None:
            self._fleet.note_host_beat(heartbeat, self._loop.time())

    def _read(self, message: Msg, decode: Callable[[bytes], Beat], subject_of: Callable[[Beat], str]) -> Beat | None:
        """Decode a heartbeat; drop undecodable messages and those that name another process."""
        try:
            heartbeat = decode(message.data)
            subject = subject_of(heartbeat)
        except (*UNDECODABLE, InvalidNameError) as error:
            self._drop(message, error)
            return None
        if subject == message.subject:
            return heartbeat
        self._drop(message, f"it names {subject}")
        return None

    def _worker_subject(self, heartbeat: Heartbeat) -> str:
        names = heartbeat.model, heartbeat.worker
        subject = self._subjects.get(names)
        if subject is None:
            if len(self._subjects) >= MAX_NAMES:
                self._subjects.clear()
            subject = self._subjects[names] = worker_subject(*names)
        return subject

    def _drop(self, message: Msg, reason: object) -> None:
        if not message.data:
            return  # `headrace doctor` and `headrace worker --check` try with nothing in it whether they may publish.
        text = "a message on %s is not a heartbeat and was dropped: %s"
        self._log_limit.warning(message.subject, text, message.subject, reason)
