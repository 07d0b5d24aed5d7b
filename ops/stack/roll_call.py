"""The supervisor's own connection to NATS: sets up the streams, and hears which workers are alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from ops.stack.console import told_of_nats
from ops.stack.plan import NatsAccess
from shared.batch_streams import DEFAULT_TENANT
from shared.calls import call_process
from shared.errors import DependencyError
from shared.messages import Heartbeat
from shared.nats_connection import SEND_ERRORS, close, connect
from shared.streams import StreamLimits, ensure_streams, reshape_streams
from shared.subjects import ALL_WORKERS, drain_subject
from shared.usage_ledger import delete_old_days, delete_old_receipts

CONNECT_TIMEOUT_S = 10.0
ANSWER_S = 2.0
RETRY_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beat:
    """What the heartbeats of one worker since the last look have shown.

    Attributes:
        advances: Whether its engine has made a step, or has nothing to do.
    """

    step: int
    advances: bool


class RollCall:
    """Owns the connection.

    Attributes:
        workers: Process ids of the workers heard so far.
        is_forbidden: Whether NATS forbids us to listen, so that `workers` stays empty.
    """

    def __init__(self, access: NatsAccess, tell: Callable[[str], None] = lambda words: None) -> None:
        self._tell = tell
        self.workers: set[int] = set()
        self.is_forbidden = False
        self._access = access
        self._beats: dict[int, Beat] = {}
        self._steps: dict[int, int] = {}
        self._client: Client | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._decoder = msgspec.msgpack.Decoder(Heartbeat)

    async def open(self) -> None:
        """Connect, make the streams, and listen.

        Raises:
            DependencyError: NATS does not answer, refuses us, is too old, or cannot make the streams.
        """
        access = self._access
        with told_of_nats(access.url, CONNECT_TIMEOUT_S, self._tell):
            self._client = await connect(
                access.url,
                role="admin",
                name="headrace-up",
                user=access.user,
                password=access.password,
                files=access.files,
                on_error=self._on_error,
                on_reconnect=self._on_reconnect,
                on_close=self._on_close,
                timeout_s=CONNECT_TIMEOUT_S,
            )
        try:
            await self._set_up()
            try:
                await self._client.subscribe(ALL_WORKERS, cb=self._on_heartbeat)
            except SEND_ERRORS as error:
                raise DependencyError(f"heartbeats cannot be listened to: {error!r}") from error
        except BaseException:
            # Abandoned, it would stay connected.
            await close(self._client)
            raise

    @property
    def is_connected(self) -> bool:
        """Whether heartbeats could be heard now, as far as the connection knows."""
        return self._client is not None and self._client.is_connected

    def take_beats(self) -> dict[int, Beat]:
        """Return the heartbeats since the last call, by process id."""
        beats, self._beats = self._beats, {}
        self._steps.update((pid, beat.step) for pid, beat in beats.items())
        return beats

    async def cordon(self, worker: str) -> None:
        """Have a worker take no new requests; `DependencyError` if it does not answer."""
        assert self._client is not None
        try:
            await call_process(self._client, drain_subject(worker), b"cordon", ANSWER_S)
        except NatsError as error:
            raise DependencyError(f"{worker} does not answer: {error!r}") from error

    async def close(self) -> None:
        """Disconnect."""
        if self._reopening is not None:
            self._reopening.cancel()
        if self._client is not None:
            await self._client.close()

    async def _set_up(self) -> None:
        assert self._client is not None
        js = self._client.jetstream()
        try:
            await ensure_streams(js, StreamLimits(), [DEFAULT_TENANT])
            await reshape_streams(js, StreamLimits(), [DEFAULT_TENANT])
            await delete_old_receipts(js)
            await delete_old_days(js)
        except SEND_ERRORS as error:
            raise DependencyError(f"streams cannot be set up: {error!r}") from error

    async def _on_reconnect(self) -> None:
        # The interactive stream lives in memory: a restarted server has forgotten it.
        try:
            await self._set_up()
        except DependencyError as error:
            _log.warning("streams not restored", extra={"error": str(error)})

    async def _on_close(self) -> None:
        if self._reopening is None or self._reopening.done():
            self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        """Connect anew after the server has closed the connection for good."""
        while self._client is None or self._client.is_closed:
            await asyncio.sleep(RETRY_S)
            try:
                await self.open()
            except DependencyError as error:
                _log.warning("NATS: %s", error)

    async def _on_error(self, error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            self.is_forbidden = True
        elif not isinstance(error, OSError):  # a server that is starting or gone is reported as such
            _log.warning("NATS reports: %s", error)

    async def _on_heartbeat(self, message: Msg) -> None:
        try:
            heartbeat = self._decoder.decode(message.data)
        except msgspec.MsgspecError:
            return
        pid = heartbeat.pid
        self.workers.add(pid)
        beat = self._beats.get(pid)
        advances = heartbeat.running == 0 or heartbeat.step != self._steps.get(pid)
        self._beats[pid] = Beat(heartbeat.step, advances or (beat is not None and beat.advances))
