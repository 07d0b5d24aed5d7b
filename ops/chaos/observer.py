"""An administrator's view of NATS during a scenario: live workers, held requests, and messages in the queues."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from shared.batch_streams import DEFAULT_TENANT, batch_stream
from shared.messages import Heartbeat
from shared.nats_connection import connect
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_streams
from shared.subjects import ALL_WORKERS


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's last heartbeat, and the monotonic time at which it came."""

    heartbeat: Heartbeat
    at: float


class Observer:
    """Owns one connection, made again after any fault; hears workers by name."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self.workers: dict[str, Seen] = {}
        self._access = (url, user, password)
        self._decoder = msgspec.msgpack.Decoder(Heartbeat)
        self._client: Client | None = None

    async def start(self) -> None:
        """Connect, make the streams, and listen to the workers."""
        url, user, password = self._access
        self._client = await connect(url, role="admin", name="chaos-observer", user=user, password=password)
        await ensure_streams(self._client.jetstream(), StreamLimits(), [DEFAULT_TENANT])
        await self._client.subscribe(ALL_WORKERS, cb=self._hear)

    async def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            with contextlib.suppress(NatsError):
                await self._client.close()

    def live_workers(self, silence_s: float) -> list[Heartbeat]:
        """Return the last heartbeats of the workers that were heard in the last `silence_s` seconds."""
        since = time.monotonic() - silence_s
        return [seen.heartbeat for seen in self.workers.values() if seen.at > since]

    async def num_queued(self) -> dict[str, int]:
        """Return how many messages the interactive and the batch stream hold, by their names.

        Raises:
            nats.errors.Error: NATS does not answer.
        """
        assert self._client is not None
        js, names = self._client.jetstream(), (INTERACTIVE_STREAM, batch_stream(DEFAULT_TENANT))
        infos = await asyncio.gather(*map(js.stream_info, names))
        return {name: info.state.messages for name, info in zip(names, infos, strict=True)}

    async def _hear(self, message: Msg) -> None:
        try:
            heartbeat = self._decoder.decode(message.data)
        except msgspec.MsgspecError:
            return  # a scenario's own malformed one
        self.workers[heartbeat.worker] = Seen(heartbeat, time.monotonic())
