"""Bounds of what each tenant has: messages in a stream that all share, and work that runs in this process."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator

from nats.js import JetStreamContext
from nats.js.errors import APIError

from shared.background_tasks import BackgroundTasks
from shared.log_limit import LogLimit
from shared.nats_connection import SEND_ERRORS

_ERRORS: tuple[type[Exception], ...] = (APIError, *SEND_ERRORS)

_log = logging.getLogger(__name__)


class TenantBound:
    """Drops a tenant's oldest messages of a stream beyond `keep`; it may exceed that by `every` for each process.

    With `when_half_full`, nothing is dropped while half of the stream's bytes are free: `keep` counts messages as if
    each had the largest size.
    """

    def __init__(
        self,
        js: JetStreamContext,
        stream: str,
        subject_of: Callable[[str], str],
        keep: int,
        every: int,
        *,
        when_half_full: bool = False,
    ) -> None:
        self._js = js
        self._stream = stream
        self._subject_of = subject_of
        self._keep = keep
        self._every = every
        self._when_half_full = when_half_full
        self._written: Counter[str] = Counter()
        self._tasks = BackgroundTasks()
        self._log_limit = LogLimit(_log)

    def count(self, tenant: str, num_messages: int) -> None:
        """Count new messages of a tenant; now and then, drop its oldest in the background."""
        self._written[tenant] += num_messages
        if self._written[tenant] >= self._every:
            del self._written[tenant]
            self._tasks.spawn(self._purge(tenant), f"purge of {self._stream} of {tenant}")

    async def close(self) -> None:
        """Wait for purges under way."""
        await self._tasks.wait()

    async def _purge(self, tenant: str) -> None:
        try:
            if self._when_half_full:
                info = await self._js.stream_info(self._stream)
                if 2 * info.state.bytes < (info.config.max_bytes or 0):
                    return
            await self._js.purge_stream(self._stream, subject=self._subject_of(tenant), keep=self._keep)
        except _ERRORS as error:
            self._log_limit.warning(tenant, "old messages of %s not dropped: %r", self._stream, error)


@contextlib.contextmanager
def counted(running: Counter[str], tenant: str, amount: int = 1) -> Iterator[None]:
    """Count work of a tenant while the block runs; a tenant without any takes no memory."""
    running[tenant] += amount
    try:
        yield
    finally:
        running[tenant] -= amount
        if not running[tenant]:
            del running[tenant]
