"""The batch queues of all tenants, as one worker pulls from them.

Each tenant has a stream of its own, and new ones are looked for while the worker runs. The room that there is for batch
requests is shared equally among the tenants known to have jobs waiting. At the others' queues a pull for one message
waits, so that their next job is noticed: so up to one request a tenant may be held beyond the room.

Jobs come many at once, and encoding the prompts of all would hold up the frames of people: one job is taken in each
turn of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from nats.errors import TimeoutError as NatsTimeoutError

from gpu_worker.consumer.batch_expiry import BatchExpiry
from gpu_worker.consumer.pull_queue import PullQueue
from gpu_worker.consumer.queued_message import REDELIVER, QueuedMessage, send_ack
from shared.batch_streams import batch_stream, batch_tenants
from shared.direct_client import DirectClient
from shared.kept_results import KeptResults
from shared.log_limit import LogLimit
from shared.streams import StreamLimits, ensure_consumer
from shared.task_supervisor import TaskSupervisor

SEARCH_INTERVAL_S = 2.0
EXPIRY_INTERVAL_S = 30.0
_LOG_INTERVAL_S = 3600.0

_log = logging.getLogger(__name__)


class BatchQueues:
    """Owns a pull queue for each tenant."""

    def __init__(
        self,
        nats: DirectClient,
        model: str,
        limits: StreamLimits,
        capacity: Callable[[], int],
        take: Callable[[QueuedMessage], None],
        tasks: TaskSupervisor,
        kept: KeptResults,
    ) -> None:
        """Pull jobs of `model`; nothing happens before `start`.

        Args:
            nats: Connection.
            model: Whose jobs.
            limits: Of consumers that are made.
            capacity: How many batch requests there is room for now, those pulled for included.
            take: Receives each message, on the event loop; must not raise.
            tasks: Runs the loops of the queues.
            kept: Where the results of expired jobs are stored.
        """
        self._nats = nats
        self._js = nats.jetstream()
        self._model = model
        self._limits = limits
        self._capacity = capacity
        self._take = take
        self._queues: dict[str, PullQueue] = {}
        self._num_redelivered_gone = 0
        self._searching = asyncio.Lock()
        self._arrived: deque[QueuedMessage] = deque()
        self._expiry = BatchExpiry(nats, kept, model)
        self._tasks = tasks
        self._log_limit = LogLimit(_log, _LOG_INTERVAL_S)
        self._periodic: list[asyncio.Task[None]] = []

    @property
    def outstanding(self) -> int:
        """Messages pulled for that have not been taken yet, those included that the server may still send."""
        return sum(queue.outstanding for queue in self._queues.values()) + len(self._arrived)

    @property
    def backlog(self) -> int:
        """Jobs left in the queues, as of the last deliveries."""
        return sum(queue.backlog for queue in self._queues.values())

    @property
    def oldest_s(self) -> float:
        """Age of the model's oldest job that is not finished, in any queue; 0 where there is none."""
        return self._expiry.oldest_s(self._queues)

    @property
    def num_redelivered(self) -> int:
        """Jobs received that NATS had delivered before."""
        return self._num_redelivered_gone + sum(queue.num_redelivered for queue in self._queues.values())

    def start(self) -> None:
        """Begin to pull, from queues that are there or appear later."""
        self._periodic = [
            self._tasks.every(SEARCH_INTERVAL_S, self.search, "search for batch queues"),
            self._tasks.every(EXPIRY_INTERVAL_S, self._expire, "batch expiry"),
        ]

    def wake(self) -> None:
        """Look at the capacity again soon."""
        for queue in self._queues.values():
            queue.wake()

    def forget(self) -> None:
        """Start over after a reconnect: the server may have lost pulls and consumers."""
        for queue in self._queues.values():
            queue.forget()

    async def drain(self) -> None:
        """Stop pulling. Messages that are on their way go back to their queues at once."""
        await self._tasks.stop(*self._periodic)
        await asyncio.gather(*(queue.drain() for queue in self._queues.values()))
        while self._arrived:
            send_ack(self._nats, self._arrived.popleft(), REDELIVER)

    async def search(self) -> None:
        """Begin to pull from queues that are new, and stop with those that are gone.

        Raises:
            DependencyError: NATS does not answer.
        """
        # One at a time: a search that began earlier must not remove what a later one has found.
        async with self._searching:
            tenants = set(await batch_tenants(self._nats, self._model))
            for tenant in tenants - self._queues.keys():
                queue = self._queue(tenant)
                await queue.start()
                self._queues[tenant] = queue
            for tenant in self._queues.keys() - tenants:
                queue = self._queues.pop(tenant)
                self._num_redelivered_gone += queue.num_redelivered
                await queue.drain()

    def _queue(self, tenant: str) -> PullQueue:
        async def ensure() -> str:
            return await ensure_consumer(self._js, self._model, "batch", self._limits, tenant)

        def share() -> int:
            return self._share(queue)

        queue = PullQueue(self._nats, batch_stream(tenant), ensure, share, self._receive, self._tasks)
        return queue

    def _receive(self, message: QueuedMessage) -> None:
        self._arrived.append(message)
        if len(self._arrived) == 1:
            asyncio.get_running_loop().call_soon(self._take_next)

    def _take_next(self) -> None:
        if not self._arrived:
            return
        self._take(self._arrived.popleft())
        if self._arrived:
            asyncio.get_running_loop().call_soon(self._take_next)

    def _share(self, queue: PullQueue) -> int:
        room = self._capacity() - len(self._arrived)
        if room <= 0:
            return 0
        if not queue.backlog:
            return 1
        num_waiting = sum(other.backlog > 0 for other in self._queues.values())
        return max(1, room // num_waiting)

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
