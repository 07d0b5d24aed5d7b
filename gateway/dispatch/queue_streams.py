"""The streams of NATS that a gateway needs: made where they are missing, at the start and after NATS was away.

A server without a disk loses the interactive stream when it restarts, and one that has lost its disk also the streams
of results and dead letters. Requests wait for the interactive stream alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from shared.dependency_wait import RECORDS_LOG_INTERVAL_S, RECORDS_RETRY_S, wait_for
from shared.direct_client import DirectClient
from shared.errors import DependencyError
from shared.log_limit import LogLimit
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_interactive_stream, ensure_record_streams

STREAM_RETRY_S = 0.25

_logger = logging.getLogger(__name__)


class QueueStreams:
    """Owns the tasks that make streams again, and knows which interactive stream was the last one."""

    def __init__(
        self, nats: DirectClient, js: JetStreamContext, limits: StreamLimits, on_restored: Callable[[bool], None]
    ) -> None:
        """Tell `on_restored` when the interactive stream is there again, and whether it is the same as before."""
        self._nats = nats
        self._js = js
        self._limits = limits
        self._on_restored = on_restored
        self._loop = asyncio.get_running_loop()
        self._log_limit = LogLimit(_logger)
        self._created: object = None
        self._restoring: asyncio.Task[None] | None = None
        self._records: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the interactive stream."""
        self._created = await wait_for("the stream of interactive requests", self._ensure_interactive)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that restore streams, running or done."""
        return [task for task in (self._restoring, self._records) if task is not None]

    async def restore(self) -> None:
        """Make the interactive stream where it is missing, or wait until it has a leader."""
        while self._nats.is_connected:
            try:
                created = await self._ensure_interactive()
            except (DependencyError, NatsError, OSError) as error:
                self._log_limit.warning("queue", "the queue of interactive requests is not there: %s", error)
                await asyncio.sleep(STREAM_RETRY_S)
                continue
            is_same, self._created = created == self._created, created
            _logger.warning("the queue of interactive requests is %s", "there" if is_same else "a new one")
            self._on_restored(is_same)
            self.restore_records()
            return

    def restore_soon(self) -> None:
        """Do the same in the background, unless that is under way."""
        if self._restoring is None:
            self._restoring = self._loop.create_task(self.restore())
            self._restoring.add_done_callback(self._forget_restoring)

    def restore_records(self) -> None:
        """Make the streams of results and dead letters in the background, or wait for them."""
        if self._records is None or self._records.done():
            what = "the streams of batch results and dead letters"
            action = partial(ensure_record_streams, self._js, self._limits)
            waiting = wait_for(what, action, RECORDS_RETRY_S, RECORDS_LOG_INTERVAL_S)
            self._records = self._loop.create_task(waiting)

    async def _ensure_interactive(self) -> object:
        """Make the interactive stream if it is missing; return when it was made."""
        await ensure_interactive_stream(self._js, self._limits)
        return (await self._js.stream_info(INTERACTIVE_STREAM)).created

    def _forget_restoring(self, task: asyncio.Task[None]) -> None:
        self._restoring = None
