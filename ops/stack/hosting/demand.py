"""Requests waiting for the models of a host: the messages in their queues, from any publisher.

Work queues keep a message until its request is claimed, so the queue alone shows the demand: no gateway has to report
it, and jobs that other clients publish wake a model too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from shared.batch_streams import batch_stream, batch_tenants
from shared.direct_client import DirectClient
from shared.errors import DependencyError
from shared.streams import INTERACTIVE_STREAM
from shared.subjects import READY_SUFFIX, encode_name

BATCH_INTERVAL_S = 2.0


class Waiting(NamedTuple):
    """How many requests wait for a model, and how many of them are batch jobs, which are not interactive."""

    num: int = 0
    num_batch: int = 0


class Demand:
    """Counts waiting requests. The batch queues, one for each tenant, are looked at less often."""

    def __init__(self, nats: DirectClient) -> None:
        self._nats = nats
        self._js = nats.jetstream()
        self._clock = asyncio.get_running_loop().time
        self._batch_at = float("-inf")
        self._batch: Counter[tuple[str, bool]] = Counter()

    async def count(self, models: Collection[str]) -> dict[str, Waiting]:
        """Return how many requests wait in the queues of each model.

        Raises:
            DependencyError: NATS does not say.
        """
        if not models:
            return {}
        try:
            waiting = await self._stored(INTERACTIVE_STREAM)
            if self._clock() - self._batch_at >= BATCH_INTERVAL_S:
                batch: Counter[tuple[str, bool]] = Counter()
                for tenant in await batch_tenants(self._nats, next(iter(models))):
                    batch += await self._stored(batch_stream(tenant))
                self._batch, self._batch_at = batch, self._clock()
        except (NatsError, OSError, ValueError) as error:
            raise DependencyError(f"NATS does not say what waits: {error!r}") from error
        waiting += self._batch
        counts = {model: [waiting[encode_name(model), is_batch] for is_batch in (False, True)] for model in models}
        return {model: Waiting(sum(found), found[True]) for model, found in counts.items()}

    async def _stored(self, stream: str) -> Counter[tuple[str, bool]]:
        """Return the number of messages of a queue by the token of their model, and whether they are batch jobs."""
        found: Counter[tuple[str, bool]] = Counter()
        try:
            info = await self._js.stream_info(stream, subjects_filter="hr.req.>")
        except NotFoundError:
            return found
        for subject, count in (info.state.subjects or {}).items():
            model, lane = subject.split(".")[2:4]
            found[model.removesuffix(READY_SUFFIX), lane == "batch"] += count
        return found
