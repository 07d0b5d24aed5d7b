"""How much waiting work of the workers admission counts: what they report, up to what gateways know to be there.

Admission counts the requests that workers report as waiting. Whoever has a worker's login can report any number, and a
queue that is made up would close the model to everybody. But gateways know what waits in workers: requests that are
claimed and have produced nothing yet. Reports count up to that number.

Preempted sequences wait too, after their first output. Here they count as running; the free blocks show them. Batch
jobs do not count: no gateway waits for them, and they give way to interactive requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.messages import GatewayHeartbeat, Heartbeat

# Estimates take a token for 3.5 bytes; it has one at least. A chat template adds tokens to each prompt.
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
    """Return how many requests wait in the workers of a model, and their prompt tokens, as far as reports are credible.

    Another gateway's heartbeat may be a second old. Requests are spread over gateways, so each is taken to wait for at
    least as many as this one. Beside a gateway of an older version, which does not report it, nothing is bounded.
    """
    requests = sum(max(0, worker.waiting - _of_batch_lane(worker)) for worker in workers)
    tokens = sum(worker.waiting_tokens for worker in workers)
    own = awaited.get(model, (0, 0))
    most_requests, most_tokens = own
    for gateway in gateways:
        if gateway.awaited is None:
            return requests, tokens
        num_requests, num_tokens = gateway.awaited.get(model, (0, 0))
        most_requests += max(num_requests, own[0])
        most_tokens += max(num_tokens, own[1])
    most_tokens = int(most_tokens * _TOKENS_PER_ESTIMATE) + most_requests * _TEMPLATE_TOKENS
    return min(requests, most_requests), min(tokens, most_tokens)


def _of_batch_lane(worker: Heartbeat) -> int:
    return 0 if worker.metrics is None else worker.metrics.waiting_batch
