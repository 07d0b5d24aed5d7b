"""Pulls from a shared JetStream consumer so that a request in the queue is here as soon as there is room for it.

While there is room, a pull for that many messages waits at the server. Pulls are short and made again: what the server
sends for the pull of a frozen worker is held up until its freeze is noticed. A worker that was paused may be paused
again soon, and a stream that had moved to it would stand still twice: for a while no pull of it waits at the server, so
that it gets only what the others have no room for. The library's `fetch` costs a task per message and gives up its
place between calls; this speaks the protocol directly: one inbox, one callback, a count.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from gpu_worker.consumer.queued_message import REDELIVER, QueuedMessage, queued_message, send_ack
from shared.consumers import PullConsumer
from shared.direct_client import DirectClient
from shared.nats_connection import SEND_ERRORS
from shared.pause_detector import PauseDetector
from shared.task_supervisor import TaskSupervisor

# Shorter than the time until a frozen worker counts as dead, so requests moved then do not go back to it.
PULL_EXPIRES_S = 0.2
# The server answers an expired pull; when its answer is this late, it has forgotten the pull.
_ANSWER_GRACE_S = 1.0
_RETRY_WAIT_S = 0.25
REST_S = 5.0
"""After a pause of this process others go first for so long; pauses that come more often are one rest."""
_REST_POLL_S = 0.05
_MAX_OUTSTANDING = 32
"""Messages are read in order, at about a millisecond each, so what goes first waits for as many of others."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class PullQueue:
    """One worker's end of one lane's queue. Owns the inbox and the count of messages pulled for and not here yet.

    `capacity` counts messages that were pulled for and are not here yet; `take` says whether it gave one back, and must
    not raise. `ensure_consumer` creates the consumer if it is missing.

    Attributes:
        outstanding: Messages that the server may still send for pulls made so far.
        last_pulled: Highest stream sequence received since the queue was lost, if it was.
        last_returned: The same of those that were given back.
        num_redelivered: Messages received that NATS had delivered before.
    """

    _nats: DirectClient
    _stream: str
    _ensure_consumer: Callable[[], Awaitable[PullConsumer]]
    _capacity: Callable[[], int]
    _take: Callable[[QueuedMessage], bool | None]
    _tasks: TaskSupervisor
    _inbox: str = field(init=False)
    _consumer: PullConsumer = field(init=False)
    _subscription: Subscription | None = None
    _task: asyncio.Task[None] | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _pauses: PauseDetector = field(default_factory=lambda: PauseDetector(PULL_EXPIRES_S, _ANSWER_GRACE_S / 2))
    _is_lost: bool = True
    _is_draining: bool = False
    _expires_at: float = 0.0
    _rests_until: float = 0.0
    _last_pending: int = 0
    _is_answered: bool = False
    outstanding: int = 0
    last_pulled: int = 0
    last_returned: int = 0
    num_redelivered: int = 0

    def __post_init__(self) -> None:
        self._inbox = self._nats.new_inbox()

    @property
    def backlog(self) -> int:
        """Messages left in the queue beyond what has been pulled for, as of the last delivery."""
        return max(0, self._last_pending - self.outstanding)

    @property
    def knows_backlog(self) -> bool:
        """Whether a pull has been answered since the start, and since the queue was lost, if it was."""
        return self._is_answered and not self._is_lost

    @property
    def is_started(self) -> bool:
        """Whether `start` has succeeded."""
        return self._task is not None

    @property
    def is_resting(self) -> bool:
        """Whether this process was paused a moment ago."""
        return asyncio.get_running_loop().time() < self._rests_until

    async def start(self) -> None:
        """Begin to pull; may be called again after a `DependencyError`: the stream is missing and cannot be made."""
        self._consumer = await self._ensure_consumer()
        self._is_lost = False
        self._subscription = await self._nats.subscribe_direct(self._inbox, self._receive)
        self._task = self._tasks.start(self._run(), f"pull {self._stream}")
        self.wake()

    def wake(self) -> None:
        """Look at the capacity again soon."""
        self._wake.set()

    def forget(self) -> None:
        """Start over after a reconnect: the server may have lost pulls, consumer and stream."""
        self._is_lost = True
        self.wake()

    def note_returned(self, message: QueuedMessage) -> None:
        """Take note that a message is given back: that it was received says nothing any more."""
        self.last_returned = max(self.last_returned, message.stream_seq)

    async def drain(self) -> None:
        """Stop pulling. Messages that are on their way go back to the queue at once."""
        self._is_draining = True
        if self._task is not None:
            await self._tasks.stop(self._task)
        if self._subscription is not None and self._nats.is_connected:
            await self._subscription.drain()  # type: ignore[no-untyped-call]
        self.outstanding = 0

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        # This queue may have been made long before it was started.
        self._pauses.tick()
        while True:
            try:
                async with asyncio.timeout(_REST_POLL_S if self.is_resting else PULL_EXPIRES_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self._pauses.tick():
                # The server's answers may lie here unread.
                self._expires_at = max(self._expires_at, loop.time())
                self._rests_until = loop.time() + REST_S
            if self.outstanding and loop.time() > self._expires_at + _ANSWER_GRACE_S:
                # Perhaps nothing arrives here any more, and what further pulls are sent would be lost.
                self._is_lost = True
            if self._is_lost:
                is_restored = await self._restore()
                # The time in which NATS does not answer is no pause.
                self._pauses.tick()
                if not is_restored:
                    continue
            missing = self._missing()
            if missing:
                await self._pull(missing)

    def _missing(self) -> int:
        missing = min(self._capacity(), _MAX_OUTSTANDING) - self.outstanding
        # Small top-ups wait until they are worth a pull, as long as there is a pull to receive the next message.
        return missing if missing > 0 and missing * 4 >= self.outstanding else 0

    async def _pull(self, count: int) -> None:
        self._expires_at = asyncio.get_running_loop().time() + PULL_EXPIRES_S
        self.outstanding += count
        until = {"no_wait": True} if self.is_resting else {"expires": int(PULL_EXPIRES_S * 1e9)}
        pull = {"batch": count, "group": self._consumer.group, **until}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer.name}"
        try:
            self._nats.send(subject, json.dumps(pull).encode(), self._inbox)
        except SEND_ERRORS as error:
            _log.warning("pull failed", extra={"stream": self._stream, "error": repr(error)})
            self.outstanding = 0
            await self._retry_later()

    async def _restore(self) -> bool:
        """Make stream and consumer where they are missing; return False where that has to be tried again."""
        try:
            self._consumer = await self._nats.unless_lost(self._ensure_consumer())
        except Exception as error:
            _log.warning("queue is not available", extra={"stream": self._stream, "error": repr(error)})
            await self._retry_later()
            return False
        self._is_lost = False
        self.outstanding = 0
        self._last_pending = 0
        self._is_answered = False
        # A recreated queue may count from less, if the clock of the last one's creator was ahead.
        self.last_pulled = self.last_returned = 0
        return True

    async def _retry_later(self) -> None:
        await asyncio.sleep(_RETRY_WAIT_S)
        self.wake()

    def _receive(self, message: Msg) -> None:
        status = message.headers.get("Status") if message.headers else None
        if status is not None and not message.data:
            self._end_pull(status, message)
            return
        queued = queued_message(message)
        if queued is None:
            return
        self.outstanding = max(0, self.outstanding - 1)
        self._last_pending, self._is_answered = queued.num_pending, True
        self.last_pulled = max(self.last_pulled, queued.stream_seq)
        self.num_redelivered += queued.num_delivered > 1
        if self._is_draining:
            self.note_returned(queued)
            send_ack(self._nats, queued, REDELIVER)
            return
        if self._take(queued):
            self.note_returned(queued)
        # A turn of the loop that pulls is costly where it comes between a request and the engine.
        if self._missing():
            self.wake()

    def _end_pull(self, status: str, message: Msg) -> None:
        """Count out a pull that ended: 404 and 408 the queue is empty, 409 the consumer is gone, 503 no responder."""
        if status == "100":
            return
        assert message.headers is not None
        unfilled = message.headers.get("Nats-Pending-Messages", "")
        self.outstanding = max(0, self.outstanding - int(unfilled)) if unfilled.isdigit() else 0
        if status not in ("404", "408"):
            _log.warning("pull refused", extra={"stream": self._stream, "status": status})
            self._is_lost = True
            asyncio.get_running_loop().call_later(_RETRY_WAIT_S, self.wake)
            return
        self._last_pending, self._is_answered = 0, True
        if not self.is_resting:
            self.wake()
