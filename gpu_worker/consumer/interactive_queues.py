"""The queues of interactive requests, as one worker pulls from them.

A republished request had its turn, and does not wait behind later ones: it has a queue of its own, from which the
worker pulls first. So have requests of a tenant below its share of a busy fleet, and suspects: while one is here or
about to come, nothing new is pulled. Pulls wait at the server while there is room. A worker with a role pulls from some
of the queues alone; the third one has the requests that prefill workers have handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.pull_queue import PullQueue
from gpu_worker.consumer.queued_message import QueuedMessage
from shared.consumers import Deliveries, PullConsumer, ensure_consumer, read_deliveries
from shared.direct_client import DirectClient
from shared.disaggregation import PROMPT_QUEUES
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_interactive_stream
from shared.subjects import Queue, request_subject
from shared.task_supervisor import TaskSupervisor


class InteractiveQueues:
    """Owns a pull queue for each.

    `is_reserved` says that nothing new may begin, because of a suspect; `taken` returns the queues to pull from.
    """

    def __init__(
        self,
        nats: DirectClient,
        model: str,
        limits: StreamLimits,
        capacity: PullCapacity,
        take: Callable[[QueuedMessage], bool],
        is_reserved: Callable[[], bool],
        tasks: TaskSupervisor,
        taken: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._js = nats.jetstream()
        self._model = model
        self._taken = taken or (lambda: PROMPT_QUEUES)
        self._limits = limits
        self._is_draining = False
        self._capacity = capacity

        def pull_queue(queue: Queue, room: Callable[[], int]) -> PullQueue:
            return PullQueue(nats, INTERACTIVE_STREAM, partial(self._ensure, queue), room, take, tasks)

        self._is_reserved = is_reserved
        self.resumed = pull_queue("resumed", partial(self._room_for_first, "resumed"))
        self.new = pull_queue("interactive", self._room_for_new)
        self.ready = pull_queue("ready", partial(self._room_for_first, "ready"))
        capacity.is_resting = lambda: self.new.is_resting
        self._by_name: dict[Queue, PullQueue] = {"resumed": self.resumed, "interactive": self.new, "ready": self.ready}
        self._of_subject = {request_subject(model, name, ""): queue for name, queue in self._by_name.items()}

    @property
    def backlog(self) -> int:
        """Requests left in the queues, as of the last deliveries."""
        return sum([queue.backlog for queue in self._pulled])

    @property
    def knows_backlog(self) -> bool:
        """Whether `backlog` is known: a worker that has just started has not seen the queues."""
        return all(queue.knows_backlog for queue in self._pulled)

    @property
    def numbers(self) -> dict[str, int]:
        """Return how far the queues of new and of resumed requests were pulled, in the fields of a heartbeat."""
        return {
            "last_pulled": self.new.last_pulled,
            "last_returned": self.new.last_returned,
            "last_resumed": self.resumed.last_pulled,
            "last_resumed_returned": self.resumed.last_returned,
        }

    @property
    def num_redelivered(self) -> int:
        """Requests received that NATS had delivered before."""
        return sum([queue.num_redelivered for queue in self._by_name.values()])

    async def start(self) -> None:
        """Begin to pull; may be called again after a `DependencyError`: the stream is missing and cannot be made."""
        for queue in (self.resumed, self.new):
            if not queue.is_started:
                await queue.start()
        await self.start_ready()

    async def start_ready(self) -> None:
        """Begin to pull what prefill workers have handed over, once this worker takes it. Raises as `start`."""
        if "ready" in self._taken() and not self.ready.is_started and not self._is_draining:
            await self.ready.start()

    async def deliveries(self, queue: Queue) -> Deliveries | None:
        """Return how a queue moves; None if it was not there until now. Raises `DependencyError` as `start`."""
        found = await read_deliveries(self._js, self._model, queue)
        if found is None:
            # Requests may wait in the stream all the same.
            await self._ensure(queue)
        return found

    def note_returned(self, message: QueuedMessage) -> None:
        """Take note that a message is given back some time after it came."""
        self._of_subject.get(message.subject, self.new).note_returned(message)

    def wake(self) -> None:
        """Look at the capacity again soon."""
        for queue in self._by_name.values():
            queue.wake()

    def forget(self) -> None:
        """Start over after a reconnect: the server may have lost pulls, consumers and the stream."""
        for queue in self._by_name.values():
            queue.forget()

    async def drain(self) -> None:
        """Stop pulling. Messages that are on their way go back to their queue at once."""
        self._is_draining = True
        await asyncio.gather(*[queue.drain() for queue in self._by_name.values()])

    async def _ensure(self, queue: Queue) -> PullConsumer:
        await ensure_interactive_stream(self._js, self._limits)
        return await ensure_consumer(self._js, self._model, queue, self._limits)

    @property
    def _pulled(self) -> list[PullQueue]:
        return [queue for name, queue in self._by_name.items() if name in self._taken()]

    def _room_for_first(self, name: Queue) -> int:
        return self._capacity.first(self.backlog) if name in self._taken() else 0

    def _room_for_new(self) -> int:
        taken = self._taken()
        if "interactive" not in taken or self._is_reserved():
            return 0
        # After a restart of NATS, what waits to go first is not known before a pull for it is answered.
        first = [queue for name, queue in (("resumed", self.resumed), ("ready", self.ready)) if name in taken]
        is_first = all(queue.knows_backlog and not queue.backlog for queue in first)
        return self._capacity.interactive(self.backlog) if is_first else 0
