"""A counting semaphore whose units go to the tenant that has been served least.

Service is what `Clients` counts for a tenant; the user of the units charges it. With `keeps_room`, a tenant that holds
something holds at most as much as is then free for all, so one alone holds half, and others find room without waiting.
`kept_free` does the same for single units: one tenant never holds the last of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.core.clients import Clients


@dataclass(slots=True, eq=False)
class _Waiter:
    amount: int
    is_wanted: Callable[[], bool]
    turn: asyncio.Future[None]


class FairSemaphore:
    """Owns the units and who waits for them. Used from one event loop."""

    def __init__(
        self,
        capacity: int,
        clients: Clients,
        *,
        keeps_room: bool = False,
        kept_free: int = 0,
        reclaim: Callable[[Callable[[], bool], str | None], None] = lambda has_room, tenant: None,
        reclaimable: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin with all units free.

        Args:
            capacity: How many units there are.
            clients: The service that tenants have had.
            keeps_room: Bound a tenant's units by the free ones.
            kept_free: Units that one tenant leaves to others.
            reclaim: Releases units held without need until the condition is true; of one tenant, unless that is None.
            reclaimable: The most that this may release.
        """
        self.capacity = capacity
        self._clients = clients
        self._keeps_room = keeps_room
        self._kept_free = kept_free
        self._reclaim = reclaim
        self._reclaimable = reclaimable
        self._used = 0
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._is_handing_out = False

    @property
    def is_overdrawn(self) -> bool:
        """Whether more is held than there is."""
        return self._used > self.capacity

    def take(self, tenant: str, amount: int) -> None:
        """Hold units whether they are free or not."""
        self._used += amount
        self._held[tenant] += amount

    async def acquire(self, tenant: str, amount: int, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Hold units as soon as it is this tenant's turn and they are free; at most `capacity`.

        Raises:
            asyncio.CancelledError: `is_wanted` was False when its turn came.
        """
        waiter = _Waiter(amount, is_wanted, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self._clients.enter(tenant)
        self._hand_out()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self.release(tenant, amount)
            else:
                # It may have been the one that all others waited behind.
                waiter.turn.cancel()
                self._hand_out()
            raise

    def release(self, tenant: str, amount: int) -> None:
        """Give units back."""
        self._used -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
        self._hand_out()

    def _hand_out(self) -> None:
        # `reclaim` calls `release`, which comes back here.
        if self._is_handing_out:
            return
        self._is_handing_out = True
        try:
            while self._hand_out_next():
                pass
        finally:
            self._is_handing_out = False

    def _hand_out_next(self) -> bool:
        """Give the next one its units; return whether another may follow."""
        for tenant in sorted(self._waiting, key=self._standing):
            waiter = self._waiting[tenant][0]
            if waiter.turn.done() or not waiter.is_wanted():
                waiter.turn.cancel()
            elif not self._is_within_share(tenant, waiter.amount):
                continue
            elif not self._is_free(waiter.amount):
                # No one passes, or a large request would wait for ever.
                return False
            else:
                self.take(tenant, waiter.amount)
                waiter.turn.set_result(None)
            self._leave(tenant)
            return True
        return False

    def _standing(self, tenant: str) -> tuple[float, int]:
        return self._clients.account(tenant).counter, self._held[tenant]

    def _leave(self, tenant: str) -> None:
        self._clients.leave(tenant)
        queue = self._waiting[tenant]
        queue.popleft()
        if not queue:
            del self._waiting[tenant]

    def _is_free(self, amount: int) -> bool:
        def has_room() -> bool:
            return self._used + amount <= self.capacity

        self._reclaim(has_room, None)
        return has_room()

    def _is_within_share(self, tenant: str, amount: int) -> bool:
        def has_room(num_more: int = 0) -> bool:
            held = self._held[tenant]
            return not held or held + amount <= self.capacity - self._used + num_more - amount

        if not self._keeps_room:
            return self._held[tenant] + amount <= self.capacity - self._kept_free
        self._reclaim(has_room, tenant)
        if not has_room() and has_room(self._reclaimable()):
            self._reclaim(has_room, None)
        return has_room()
