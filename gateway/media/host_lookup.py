"""Looks up the addresses of hosts from which images are fetched, in threads of its own.

A lookup cannot be interrupted: a name server that answers late holds a thread until the system's resolver gives up. So
a tenant has a few threads at most, those count until their lookups have ended, and tenants that wait take turns.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from gateway.shares import Turns

MAX_AT_ONCE = 16
MAX_AT_ONCE_OF_ONE = 4


class HostLookup:
    """Owns the threads. Used from one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_AT_ONCE, "image-hosts")
        self._turns = Turns(MAX_AT_ONCE, MAX_AT_ONCE_OF_ONE)

    async def addresses(self, tenant: str, host: str, port: int) -> list[str]:
        """Return the addresses of a host, when it is the tenant's turn; `OSError` or `UnicodeError` if it has none."""
        await self._turns.take(tenant)
        lookup = asyncio.get_running_loop().run_in_executor(self._pool, _addresses, host, port)
        lookup.add_done_callback(lambda done: self._end(tenant, done))
        # The thread stays taken when the caller gives up.
        return await asyncio.shield(lookup)

    def _end(self, tenant: str, lookup: asyncio.Future[list[str]]) -> None:
        if not lookup.cancelled():
            # Its waiters may be gone.
            lookup.exception()
        self._turns.give_back(tenant)


def _addresses(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
