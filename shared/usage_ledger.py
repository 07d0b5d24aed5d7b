"""What each tenant has had of each model, by lane: counted by gateways and workers, added up by NATS, kept for good.

The stream `HR_USAGE` is one of counters: a message names a change, NATS adds it to the total of its subject. So totals
outlive every process. Gateways count answers over HTTP, workers jobs of the batch lane. A process that is killed loses
what it has counted in the last `FLUSH_S`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from shared.errors import InvalidNameError
from shared.log_limit import LogLimit
from shared.messages import Lane
from shared.nats_connection import SEND_ERRORS
from shared.streams import USAGE_DUPLICATE_WINDOW_S, USAGE_STREAM
from shared.subjects import decode_name, usage_subject

FLUSH_S = 5.0
_NAME = "Nats-Msg-Id"
# After NATS refused a change: the stream may be missing.
_PAUSE_S = 30.0
Measure = Literal["requests", "prompt_tokens", "cached_tokens", "completion_tokens"]

_REFUSALS: tuple[type[Exception], ...] = (APIError, NoStreamResponseError)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Change:
    """What was counted of a subject, under a name by which NATS drops it if it has taken it before."""

    count: int
    name: str
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """One total."""

    tenant: str
    model: str
    lane: str
    measure: str
    total: int


class UsageLedger:
    """Counts in memory, and sends what has been counted. The counts are written by the event loop's thread alone."""

    def __init__(self, lane: Lane) -> None:
        """Count answers of a lane; nothing is sent before `flush`."""
        self._lane: Lane = lane
        self._counted: Counter[str] = Counter()
        self._sending: dict[str, _Change] = {}
        self._paused_until = 0.0
        self._is_flushing = asyncio.Lock()
        self._log_limit = LogLimit(_log)

    def add(self, tenant: str, model: str, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Count an answer."""
        counts: dict[Measure, int] = {
            "requests": 1,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "completion_tokens": completion_tokens,
        }
        for measure, count in counts.items():
            if count:
                self._counted[usage_subject(tenant, model, self._lane, measure)] += count

    async def flush(self, js: JetStreamContext, *, is_last: bool = False) -> None:
        """Send what has been counted; what NATS does not take is sent again, and counts once.

        NATS drops a change that it had taken for ten minutes. After a longer outage a gateway looks whether it is the
        last one of its subject; a worker may not read the stream, and what it sends again counts again.

        Args:
            js: Where to send.
            is_last: The process ends: try whatever NATS said before.
        """
        if time.monotonic() < self._paused_until and not is_last:
            return
        async with self._is_flushing:
            while self._sending or self._counted:
                if not self._sending:
                    # The name lets NATS drop a change that it had taken, and whose acknowledgement was lost.
                    self._sending = {
                        subject: _Change(count, secrets.token_hex(8)) for subject, count in self._counted.items()
                    }
                    self._counted.clear()
                try:
                    await self._send(js)
                except _REFUSALS as error:
                    self._paused_until = time.monotonic() + _PAUSE_S
                    told = "usage of tenants is not kept (%r): run `headrace setup`, and check NATS's permissions"
                    self._log_limit.warning("usage", told, error)
                    return
                except SEND_ERRORS as error:
                    # NATS does not answer a change that it does not permit either.
                    told = "usage of tenants is not kept yet (%r), it is sent again; or NATS's permissions are missing"
                    self._log_limit.warning("unanswered", told, error)
                    return

    async def _send(self, js: JetStreamContext) -> None:
        for subject, change in list(self._sending.items()):
            if not await self._was_taken(js, subject, change):
                change.sent_at = change.sent_at or time.monotonic()
                headers = {"Nats-Incr": f"+{change.count}", _NAME: change.name}
                await js.publish(subject, b"", headers=headers)
            del self._sending[subject]

    async def _was_taken(self, js: JetStreamContext, subject: str, change: _Change) -> bool:
        """Look whether NATS took a change that it does not recognise any more."""
        if self._lane != "interactive" or change.sent_at is None:
            return False
        # The window begins when NATS takes it, and some of it passes until it is sent again.
        if time.monotonic() - change.sent_at < USAGE_DUPLICATE_WINDOW_S / 2:
            return False
        try:
            last = await js.get_last_msg(USAGE_STREAM, subject)
        except NotFoundError:
            return False
        return (last.headers or {}).get(_NAME) == change.name

    async def flush_forever(self, js: JetStreamContext) -> None:
        """Send every few seconds."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush(js)


async def read_usage(js: JetStreamContext, most: int | None = None) -> AsyncIterator[UsageTotal]:
    """Yield the totals, of very many those that changed least recently.

    Raises:
        nats.errors.Error: NATS does not answer, or there is no such stream.
    """
    seq, num_read = 0, 0
    while most is None or num_read < most:
        try:
            message = await js.get_msg(USAGE_STREAM, seq=seq + 1, subject="hr.usage.>", next=True)
        except NotFoundError as error:
            if error.err_code == _NO_MORE:
                return
            raise
        assert message.seq is not None
        seq, num_read = message.seq, num_read + 1
        tenant, model, lane, measure = (message.subject or "").split(".")[2:]
        try:
            total = int(json.loads(message.data or b"")["val"])
            yield UsageTotal(decode_name(tenant), decode_name(model), lane, measure, total)
        except (ValueError, KeyError, TypeError, InvalidNameError):
            continue  # of another version


_NO_MORE = 10037
