"""Inflates and reads large bodies, and reads stored responses, in a thread, so that streams go on meanwhile.

A body of 4 MB can have a hundred thousand parts, which take a fifth of a second, and be inflated from 4 KB. That is
before its key's limits are asked, since those are in tokens. One is read at a time, and tenants take turns.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from gateway.errors import ApiError
from gateway.http1.body import decompressed, inflated_size

Result = TypeVar("Result")

LARGE_BYTES = 64 << 10
"""Smaller ones take a few milliseconds at most."""
MAX_WAITING_BYTES = 32 << 20
# Of gzip: blocks of a few bytes each, with codes of their own, take 15 ms in 64 KB.
_LARGE_COMPRESSED_BYTES = 16 << 10
# Reading that much takes about two seconds.
_RETRY_S = 2.0


class LargeBodies:
    """Tracks waiting bodies. Used from one event loop."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        # Of its own: nothing else makes a body wait for a thread.
        self._thread = ThreadPoolExecutor(1, "large-bodies")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()

    async def inflated(self, tenant: str, body: bytes, max_bytes: int) -> bytes:
        """Return an inflated gzip body."""
        # Both are in memory, and count before the first byte is inflated.
        num_bytes = len(body) + inflated_size(body, max_bytes)
        read = partial(decompressed, body, max_bytes)
        return await self.read(tenant, num_bytes, read, is_slow=len(body) > _LARGE_COMPRESSED_BYTES)

    async def read(self, tenant: str, num_bytes: int, read: Callable[[], Result], *, is_slow: bool = False) -> Result:
        """Return what `read` makes of a body. It runs in a thread, so it touches nothing that others do.

        With `is_slow` the body counts as a large one, whatever its size.

        Raises:
            ApiError: 429; the tenant has sent too many large ones at once. Or whatever `read` raises.
        """
        if num_bytes <= LARGE_BYTES and not is_slow:
            return read()
        waiting = self._waiting[tenant]
        if waiting and waiting + num_bytes > MAX_WAITING_BYTES:
            message = f"Bodies of this tenant with {waiting >> 20} MB wait to be read. Send fewer large ones at once."
            raise ApiError(429, message, code="too_many_body_bytes", retry_after_s=_RETRY_S)
        self._waiting[tenant] += num_bytes
        try:
            return await self.in_thread(tenant, read)
        finally:
            self._waiting[tenant] -= num_bytes
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    async def read_kept(self, tenant: str, num_bytes: int, read: Callable[[], Result]) -> Result:
        """Return what `read` makes of bytes that are stored; how many a tenant reads at once is bounded elsewhere."""
        return read() if num_bytes <= LARGE_BYTES else await self.in_thread(tenant, read)

    async def in_thread(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Return the result of work that takes long whatever the size of its input."""
        async with self._turns.setdefault(tenant, asyncio.Lock()), self._one:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
