"""Looks up the addresses of hosts from which images are fetched, in threads of its own.

A lookup cannot be interrupted: a name server that answers late holds a thread until the system's resolver gives up. So
a tenant has a few threads at most, those count until their lookups have ended, and tenants that wait take turns.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

MAX_AT_ONCE = 16
MAX_AT_ONCE_OF_ONE = 4


class HostLookup:
    """Owns the threads. Used from one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_AT_ONCE, "image-hosts")
        self._running: Counter[str] = Counter()
        # The first tenant is next.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def addresses(self, tenant: str, host: str, port: int) -> list[str]:
        """Return the addresses of a host, when it is the tenant's turn; `OSError` or `UnicodeError` if it has none."""
        await self._turn(tenant)
        lookup = asyncio.get_running_loop().run_in_executor(self._pool, _addresses, host, port)
        lookup.add_done_callback(lambda done: self._end(tenant, done))
        # The thread stays taken when the caller gives up.
        return await asyncio.shield(lookup)

    async def _turn(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(tenant)
            raise

    def _begin(self) -> None:
        """Give free threads to tenants in turn."""
        while self._running.total() < MAX_AT_ONCE:
            tenant = next((name for name in self._waiting if self._running[name] < MAX_AT_ONCE_OF_ONE), None)
            if tenant is None:
                return
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():
                self._running[tenant] += 1
                turn.set_result(None)

    def _end(self, tenant: str, lookup: asyncio.Future[list[str]]) -> None:
        if not lookup.cancelled():
            # Nobody may wait for it any more.
            lookup.exception()
        self._give_back(tenant)

    def _give_back(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._begin()


def _addresses(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
