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


def pulled_between(heartbeats: Sequence[Heartbeat], queue: Queue) -> tuple[int, int]:
    """Return the highest stream sequence of a queue that one of these workers gave back, and that one was sent."""
    if queue == "ready":
        roles = [beat.roles for beat in heartbeats if beat.roles is not None]
        numbers = [(each.last_ready_returned, each.last_ready) for each in roles]
    elif queue == "resumed":
        numbers = [(beat.last_resumed_returned, beat.last_resumed) for beat in heartbeats]
    else:
        numbers = [(beat.last_returned, beat.last_pulled) for beat in heartbeats]
    returned, sent = zip(*numbers, strict=True) if numbers else ((0,), (0,))
    return max(returned), max(sent)
