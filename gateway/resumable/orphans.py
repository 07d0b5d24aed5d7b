"""Streams whose gateway has died and for which no client has asked yet: they are generated on for their grace period.

A gateway looks for them when another one falls silent, and once after its own start, since all may have died. It reads
the heads of the streams that have not ended, and opens those whose owner is gone, as a client's question would.
Several gateways may look at once: only one can own a stream, and each begins at another place of the list.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from gateway.errors import ApiError
from gateway.fleet.fleet import GATEWAY_SILENCE_S, Fleet
from gateway.resumable.calls import OwnerCalls
from gateway.resumable.log import ERRORS, Stored, StreamLog

_LOOK_EVERY_S = 1.0
# Heads that are read at once.
_AT_ONCE = 8

_log = logging.getLogger(__name__)


class Orphans:
    """Looks for streams without a gateway."""

    def __init__(
        self, log: StreamLog, calls: OwnerCalls, fleet: Fleet, adopt: Callable[[Stored], Awaitable[None]]
    ) -> None:
        self._log = log
        self._calls = calls
        self._fleet = fleet
        self._adopt = adopt

    async def look_forever(self) -> None:
        """Look after this process has started, and whenever another gateway falls silent."""
        await asyncio.sleep(GATEWAY_SILENCE_S)
        known, is_due = self._fleet.gateways, True
        while True:
            if is_due and await self.look():
                is_due = False
            await asyncio.sleep(_LOOK_EVERY_S)
            before, known = known, self._fleet.gateways
            is_due = is_due or bool(before - known)

    async def look(self) -> bool:
        """Adopt the streams whose owners are dead; False if the log does not answer."""
        try:
            places = await self._log.running()
            random.shuffle(places)
            for start in range(0, len(places), _AT_ONCE):
                await asyncio.gather(*(self._look_at(*place) for place in places[start : start + _AT_ONCE]))
        except ERRORS as error:
            _log.warning("no look for streams without a gateway: %r", error)
            return False
        return True

    async def _look_at(self, tenant: str, stream_id: str) -> None:
        found = await self._log.find(tenant, stream_id)
        if found is None or found.head.ended is not None or found.head.is_cut:
            return
        if not await self._calls.is_dead(found.head.owner):
            return
        try:
            await self._adopt(found)
        except ApiError as error:
            _log.warning("stream %s has lost its gateway, and cannot go on: %s", stream_id, error.message)
