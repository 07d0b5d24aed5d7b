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

Beat = TypeVar("Beat", GatewayHeartbeat, HostBeat)

_logger = logging.getLogger(__name__)


class HeartbeatReceiver:
    """Feeds the fleet."""

    def __init__(self, fleet: Fleet, on_worker: Callable[[str, str], None]) -> None:
        self._fleet = fleet
        self._on_worker = on_worker
        self._loop = asyncio.get_running_loop()
        self._log_limit = LogLimit(_logger)
        # Names by the subject that they belong to: encoding them for each heartbeat would be most of its cost.
        self._names: dict[str, tuple[str, str]] = {}
        self._decode_worker = msgspec.msgpack.Decoder(Heartbeat).decode

    async def start(self, nats: DirectClient) -> None:
        """Begin to listen."""
        note, note_host = self._fleet.note_gateway_heartbeat, self._fleet.note_host_beat
        receive = self._receiver(GatewayHeartbeat, lambda beat: gateway_subject(beat.gateway), note)
        receive_host = self._receiver(HostBeat, lambda beat: host_subject(beat.host), note_host)
        await nats.subscribe_direct(ALL_WORKERS, self._receive_worker)
        await nats.subscribe_direct(ALL_GATEWAYS, receive)
        await nats.subscribe_direct(ALL_HOSTS, receive_host)

    def _receive_worker(self, message: Msg) -> None:
        try:
            heartbeat = self._decode_worker(message.data)
            names = (heartbeat.model, heartbeat.worker)
            is_own = self._names.get(message.subject) == names or worker_subject(*names) == message.subject
        except (*UNDECODABLE, InvalidNameError) as error:
            self._drop(message, error)
            return
        if not is_own:
            self._drop(message, f"it names worker {heartbeat.worker!r} of model {heartbeat.model!r}")
        elif self._fleet.serves_another(heartbeat.worker, heartbeat.model):
            self._drop(message, f"a worker {heartbeat.worker!r} whose heartbeats come serves another model")
        elif not self._fleet.has_room_for(heartbeat.worker):
            self._drop(message, f"there are {MAX_WORKERS} workers already")
        else:
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            self._names[message.subject] = names
            self._on_worker(heartbeat.model, heartbeat.worker)
            self._fleet.note_heartbeat(heartbeat, self._loop.time())

    def _receiver(
        self, kind: type[Beat], subject_of: Callable[[Beat], str], note: Callable[[Beat, float], None]
    ) -> Callable[[Msg], None]:
        decode = msgspec.msgpack.Decoder(kind).decode

        def receive(message: Msg) -> None:
            try:
                beat = decode(message.data)
                subject = subject_of(beat)
            except (*UNDECODABLE, InvalidNameError) as error:
                self._drop(message, error)
                return
            if subject == message.subject:
                note(beat, self._loop.time())
            else:
                self._drop(message, f"it names {subject}")

        return receive

    def _drop(self, message: Msg, reason: object) -> None:
        if not message.data:
            return  # `headrace doctor` and `headrace worker --check` try with nothing in it whether they may publish.
        text = "a message on %s is not a heartbeat and was dropped: %s"
        self._log_limit.warning(message.subject, text, message.subject, reason)
