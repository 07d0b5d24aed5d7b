"""The batch queues of all tenants, as one worker pulls from them.

Tenants known to have jobs waiting share the room equally. At the others' queues a pull for one message waits, so one
request a tenant may be held beyond the room. Background responses have a queue of their own in the same stream, since a
person waits for each: a few of each tenant are pulled with the room for people. One job is taken in each turn of the
event loop: encoding the prompts of many would hold up the frames of people.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext

from gpu_worker.consumer.batch_expiry import BatchExpiry
from gpu_worker.consumer.batch_lane import MAX_BACKGROUND, BatchLane
from gpu_worker.consumer.held_request import HeldRequests
from gpu_worker.consumer.interactive_queues import InteractiveQueues
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.pull_queue import PullQueue
from gpu_worker.consumer.queued_message import REDELIVER, REDELIVER_LATER, QueuedMessage, send_ack
from gpu_worker.engine.engine_thread import EngineThread
from shared.batch_streams import batch_stream, batch_tenants
from shared.consumers import PullConsumer, ensure_consumer
from shared.direct_client import DirectClient
from shared.log_limit import LogLimit
from shared.streams import StreamLimits
from shared.subjects import Queue
from shared.task_supervisor import TaskSupervisor

SEARCH_INTERVAL_S = 2.0
EXPIRY_INTERVAL_S = 30.0
_LOG_INTERVAL_S = 3600.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class BatchQueues:
    """Owns the pull queues of each tenant; the lane gets what comes."""

    _nats: DirectClient
    _model: str
    _limits: StreamLimits
    _engine: EngineThread
    _held: HeldRequests
    _capacity: PullCapacity
    _interactive: InteractiveQueues
    _lane: BatchLane
    _tasks: TaskSupervisor
    _js: JetStreamContext = field(init=False)
    # By tenant.
    _queues: dict[str, PullQueue] = field(default_factory=dict)
    _background: dict[str, PullQueue] = field(default_factory=dict)
    _num_redelivered_gone: int = 0
    _searching: asyncio.Lock = field(default_factory=asyncio.Lock)
    _arrived: deque[QueuedMessage] = field(default_factory=deque)
    _expiry: BatchExpiry = field(init=False)
    _log_limit: LogLimit = field(default_factory=lambda: LogLimit(_log, _LOG_INTERVAL_S))
    _periodic: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._js = self._nats.jetstream()
        self._expiry = BatchExpiry(self._nats, self._lane.results.kept, self._model)

    @property
    def outstanding(self) -> int:
        """Messages pulled for that have not been taken yet, those included that the server may still send."""
        return sum(queue.outstanding for queue in self._all()) + len(self._arrived)

    @property
    def backlog(self) -> int:
        """Jobs left in the queues, as of the last deliveries."""
        return sum(queue.backlog for queue in self._all())

    @property
    def oldest_s(self) -> float:
        """Age of the model's oldest job that is not finished, in any queue; 0 where there is none."""
        return self._expiry.oldest_s(self._queues)

    @property
    def num_redelivered(self) -> int:
        """Jobs received that NATS had delivered before."""
        return self._num_redelivered_gone + sum(queue.num_redelivered for queue in self._all())

    def start(self) -> None:
        """Begin to pull, from queues that are there or appear later."""
        self._periodic = [
            self._tasks.every(SEARCH_INTERVAL_S, self.search, "search for batch queues"),
            self._tasks.every(EXPIRY_INTERVAL_S, self._expire, "batch expiry"),
        ]

    def wake(self) -> None:
        """Look at the capacity again soon."""
        for queue in self._all():
            queue.wake()

    def forget(self) -> None:
        """Start over after a reconnect: the server may have lost pulls and consumers."""
        for queue in self._all():
            queue.forget()

    async def drain(self) -> None:
        """Stop pulling. Messages that are on their way go back to their queues at once."""
        try:
            await self._tasks.stop(*self._periodic)
            await asyncio.gather(*(queue.drain() for queue in self._all()))
        finally:
            while self._arrived:
                send_ack(self._nats, self._arrived.popleft(), REDELIVER)

    async def search(self) -> None:
        """Begin to pull from new queues, and stop with those that are gone; `DependencyError` without NATS."""
        # One at a time: a search that began earlier must not remove what a later one has found.
        async with self._searching:
            await self._match(self._queues, "batch", self._share, self._receive)
            # After the others: a login of an earlier version may not make these consumers.
            await self._match(self._background, "background", self._background_share, self._lane.take)

    async def _match(
        self,
        queues: dict[str, PullQueue],
        kind: Queue,
        share: Callable[[PullQueue, str], int],
        take: Callable[[QueuedMessage], None],
    ) -> None:
        tenants = set(await batch_tenants(self._nats, self._model, kind))
        for tenant in queues.keys() - tenants:
            queue = queues.pop(tenant)
            self._num_redelivered_gone += queue.num_redelivered
            await queue.drain()
        for tenant in tenants - queues.keys():
            queue = self._queue(tenant, kind, share, take)
            await queue.start()
            queues[tenant] = queue

    def _queue(
        self, tenant: str, kind: Queue, share: Callable[[PullQueue, str], int], take: Callable[[QueuedMessage], None]
    ) -> PullQueue:
        async def ensure() -> PullConsumer:
            return await ensure_consumer(self._js, self._model, kind, self._limits, tenant)

        def capacity() -> int:
            return share(queue, tenant)

        queue = PullQueue(self._nats, batch_stream(tenant), ensure, capacity, take, self._tasks)
        return queue

    def _all(self) -> list[PullQueue]:
        return [*self._queues.values(), *self._background.values()]

    def _receive(self, message: QueuedMessage) -> None:
        self._arrived.append(message)
        if len(self._arrived) == 1:
            asyncio.get_running_loop().call_soon(self._take_next)

    def _take_next(self) -> None:
        if not self._arrived:
            return
        message = self._arrived.popleft()
        try:
            self._lane.take(message)
        except BaseException:
            send_ack(self._nats, message, REDELIVER_LATER)
            raise
        finally:
            if self._arrived:
                asyncio.get_running_loop().call_soon(self._take_next)

    def _background_share(self, queue: PullQueue, tenant: str) -> int:
        room = 0
        if self._may_take_jobs():
            room = self._capacity.interactive(self._interactive.backlog)
            room = min(room, MAX_BACKGROUND - self._held.num_background_of(tenant))
        return min(room, max(1, queue.backlog)) if room > 0 else self._share(queue, tenant)

    def _share(self, queue: PullQueue, tenant: str) -> int:
        if not self._may_take_jobs():
            return 0
        room = self._capacity.batch(self._interactive.backlog, self._engine.stats.max_batch_seqs) - len(self._arrived)
        if room <= 0:
            return 0
        if not queue.backlog:
            return 1
        num_waiting = sum(other.backlog > 0 for other in self._all())
        return max(1, room // num_waiting)

    def _may_take_jobs(self) -> bool:
        # If a batch request killed the worker, the suspect beside it would be blamed.
        return not (self._held.has_suspect or self._lane.results.is_blocked or self._lane.trials.is_active)

    async def _expire(self) -> None:
        # All at once: NATS answers no call that a login may not make, such as one that is for the queues of one model
        # alone, and each of those waits until its time is over.
        tenants = list(self._queues)
        outcomes = await asyncio.gather(*map(self._expiry.expire, tenants), return_exceptions=True)
        for tenant, outcome in zip(tenants, outcomes, strict=True):
            if isinstance(outcome, NatsTimeoutError):
                text = "a batch queue cannot be read: NATS is slow, or this login may not; others expire old jobs"
                self._log_limit.warning("expiry", text, extra={"tenant": tenant})
            elif isinstance(outcome, BaseException):
                raise outcome
