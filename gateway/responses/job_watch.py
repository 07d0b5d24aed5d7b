"""Hears of one job while it runs: what its worker records, and that its result is stored.

A worker's record is heard on its subject before it can be read from its stream, and without asking. `Follower` reads
the stream all the same from time to time: records that are published while NATS is away are lost to subscribers, and
NATS may have permissions of an earlier version, which allow no subscription.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.batch_progress import BatchProgress
from shared.direct_client import DirectClient
from shared.nats_connection import SEND_ERRORS
from shared.subjects import progress_subject, stored_subject


class JobWatch:
    """The subscriptions for one job, and the latest record that they brought.

    Attributes:
        changed: Done when there is something new; a new one after `take`.
        has_heard: Something has been heard, so the subscriptions work.
    """

    def __init__(self) -> None:
        """Hear of nothing; `start` subscribes."""
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_heard = False
        self._latest: BatchProgress | None = None
        self._subscriptions: list[Subscription] = []

    @property
    def is_subscribed(self) -> bool:
        """Whether it has subscriptions, which `close` ends."""
        return bool(self._subscriptions)

    async def start(self, nats: DirectClient, tenant: str, response_id: str) -> None:
        """Subscribe. Where that is impossible nothing is heard."""
        handlers = ((progress_subject, self._receive_record), (stored_subject, self._receive_end))
        with contextlib.suppress(*SEND_ERRORS):
            for subject, handler in handlers:
                self._subscriptions.append(await nats.subscribe_direct(subject(tenant, response_id), handler))

    def take(self, stream_seq: int) -> BatchProgress | None:
        """Return the newest record of the job with this number that has not been taken; None: ask NATS."""
        if self.changed.done():
            self.changed = asyncio.get_running_loop().create_future()
        record, self._latest = self._latest, None
        return record if record is not None and record.stream_seq == stream_seq else None

    async def close(self) -> None:
        """Subscribe to nothing any more."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            with contextlib.suppress(*SEND_ERRORS):
                await subscription.unsubscribe()

    def _receive_record(self, message: Msg) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            self._latest = msgspec.msgpack.decode(message.data, type=BatchProgress)
            self._note()

    def _receive_end(self, message: Msg) -> None:
        # The result itself is read from where it is stored.
        self._latest = None
        self._note()

    def _note(self) -> None:
        self.has_heard = True
        if not self.changed.done():
            self.changed.set_result(None)
