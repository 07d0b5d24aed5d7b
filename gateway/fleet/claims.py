"""How much waiting work workers can truthfully claim.

Admission counts what workers say is waiting in them. A worker's login is enough to say anything, and a made-up queue
would close a model to everybody. What waits in workers was given to them by gateways, which know it: requests that are
claimed and have produced nothing yet. Claims count up to that.

Sequences that a worker has set aside for want of memory wait too, after their first output; they count as running here,
and show in the free blocks. Batch jobs, which no gateway waits for, give way to people and do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.messages import GatewayHeartbeat, Heartbeat

# Estimates are of 3.5 bytes a token, and a token is a byte or more; a chat template adds to each prompt.
_TOKENS_PER_ESTIMATE = 3.5
_TEMPLATE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """What this gateway knows of its own requests.

    Attributes:
        unshown: Of a model: requests that no heartbeat shows, and their prompt tokens.
        awaited: By model: requests that are claimed and have produced nothing yet, and their prompt tokens.
    """

    unshown: Callable[[str], tuple[int, int]]
    awaited: Callable[[], dict[str, tuple[int, int]]]


def credible_waiting(
    model: str,
    workers: Sequence[Heartbeat],
    gateways: Sequence[GatewayHeartbeat],
    awaited: dict[str, tuple[int, int]],
) -> tuple[int, int]:
    """Return how many requests wait in the workers of a model, and their prompt tokens: what they say, within reason.

    Another gateway's heartbeat may be a second old, and requests are spread over gateways: each is taken to wait for as
    many as this one at least. With a gateway of an older version, which does not say, claims are not bounded.
    """
    requests = sum(max(0, worker.waiting - _of_batch_lane(worker)) for worker in workers)
    tokens = sum(worker.waiting_tokens for worker in workers)
    own = awaited.get(model, (0, 0))
    most_requests, most_tokens = own
    for gateway in gateways:
        if gateway.awaited is None:
            return requests, tokens
        theirs = gateway.awaited.get(model, (0, 0))
        most_requests += max(theirs[0], own[0])
        most_tokens += max(theirs[1], own[1])
    most_tokens = int(most_tokens * _TOKENS_PER_ESTIMATE) + most_requests * _TEMPLATE_TOKENS
    return min(requests, most_requests), min(tokens, most_tokens)


def _of_batch_lane(worker: Heartbeat) -> int:
    return 0 if worker.metrics is None else worker.metrics.waiting_batch
