"""The two queues of people's requests, as one worker pulls from them.

What is published again had its turn, and does not wait behind those who came later: it has a queue of its own, from
which is pulled first. So have a tenant's requests that has less than its share of a busy fleet, and suspects: while one
is here or about to come, nothing new is pulled. Pulls of both wait at the server while there is room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.pull_queue import PullQueue
from gpu_worker.consumer.queued_message import QueuedMessage
from shared.direct_client import DirectClient
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_consumer, ensure_interactive_stream
from shared.subjects import Queue, request_subject
from shared.task_supervisor import TaskSupervisor


class InteractiveQueues:
    """Owns a pull queue for each.

    `is_reserved` says that nothing new may begin, because of a suspect.
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
    ) -> None:
        self._js = nats.jetstream()
        self._model = model
        self._resumed_subject = request_subject(model, "resumed", "")
        self._limits = limits
        self._capacity = capacity

        def pull_queue(queue: Queue, room: Callable[[], int]) -> PullQueue:
            return PullQueue(nats, INTERACTIVE_STREAM, partial(self._ensure, queue), room, take, tasks)

        self._is_reserved = is_reserved
        self.resumed = pull_queue("resumed", self._room_for_resumed)
        self.new = pull_queue("interactive", self._room_for_new)

    @property
    def backlog(self) -> int:
        """Requests left in both queues, as of the last deliveries."""
        return self.resumed.backlog + self.new.backlog

    @property
    def knows_backlog(self) -> bool:
        """Whether `backlog` is known: a worker that has just started has not seen the queues."""
        return self.resumed.knows_backlog and self.new.knows_backlog

    @property
    def num_redelivered(self) -> int:
        """Requests received that NATS had delivered before."""
        return self.resumed.num_redelivered + self.new.num_redelivered

    async def start(self) -> None:
        """Begin to pull; may be called again after an error.

        Raises:
            DependencyError: The stream is missing and cannot be made.
        """
        for queue in (self.resumed, self.new):
            if not queue.is_started:
                await queue.start()

    def note_returned(self, message: QueuedMessage) -> None:
        """Take note that a message is given back some time after it came."""
        queue = self.resumed if message.subject == self._resumed_subject else self.new
        queue.note_returned(message)

    def wake(self) -> None:
        """Look at the capacity again soon."""
        self.resumed.wake()
        self.new.wake()

    def forget(self) -> None:
        """Start over after a reconnect: the server may have lost pulls, consumers and the stream."""
        self.resumed.forget()
        self.new.forget()

    async def drain(self) -> None:
        """Stop pulling. Messages that are on their way go back to their queue at once."""
        await asyncio.gather(self.resumed.drain(), self.new.drain())

    async def _ensure(self, queue: Queue) -> str:
        await ensure_interactive_stream(self._js, self._limits)
        return await ensure_consumer(self._js, self._model, queue, self._limits)

    def _room_for_resumed(self) -> int:
        return self._capacity.first(self.backlog)

    def _room_for_new(self) -> int:
        # After a restart of NATS, what waits to go first is not known before a pull for it is answered.
        is_first = self.resumed.knows_backlog and not self.resumed.backlog
        return self._capacity.interactive(self.backlog) if is_first and not self._is_reserved() else 0
