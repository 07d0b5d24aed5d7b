"""What heartbeats say of the queues from which workers take requests."""

from __future__ import annotations

from collections.abc import Sequence

from shared.disaggregation import PROMPT_QUEUES
from shared.messages import Heartbeat
from shared.subjects import Queue


def takes(heartbeat: Heartbeat, queue: Queue) -> bool:
    """Return whether a worker takes from a queue at present."""
    return queue in (PROMPT_QUEUES if heartbeat.roles is None else heartbeat.roles.takes)


def sees_empty_queue(heartbeat: Heartbeat) -> bool:
    """Return whether nothing waits in a worker, nor in the queues from which it takes."""
    return heartbeat.knows_queue and heartbeat.queue_pending == heartbeat.waiting == 0


def pulled_up_to(heartbeat: Heartbeat, queue: Queue) -> int:
    """Return the highest stream sequence of a queue that a worker was sent."""
    if queue == "ready":
        return 0 if heartbeat.roles is None else heartbeat.roles.last_ready
    return heartbeat.last_resumed if queue == "resumed" else heartbeat.last_pulled


def all_pulled(heartbeat: Heartbeat) -> list[int]:
    """Return the highest stream sequence of each queue that a worker was sent."""
    return [pulled_up_to(heartbeat, queue) for queue in (*PROMPT_QUEUES, "ready")]


def returned_up_to(heartbeat: Heartbeat, queue: Queue) -> int:
    """Return the highest stream sequence of a queue that a worker gave back."""
    if queue == "ready":
        return 0 if heartbeat.roles is None else heartbeat.roles.last_ready_returned
    return heartbeat.last_resumed_returned if queue == "resumed" else heartbeat.last_returned


def pulled_between(heartbeats: Sequence[Heartbeat], queue: Queue) -> tuple[int, int]:
    """Return the highest stream sequence of a queue that one of these workers gave back, and that one was sent."""
    returned = max([returned_up_to(beat, queue) for beat in heartbeats], default=0)
    return returned, max([pulled_up_to(beat, queue) for beat in heartbeats], default=0)
