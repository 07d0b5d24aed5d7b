"""Units that tenants share: what is not waited for any more holds none."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gpu_worker.core.clients import Clients
from gpu_worker.media.fair_semaphore import FairSemaphore


async def num_taken(units: FairSemaphore, tenant: str, wanted: int) -> int:
    """Return how many single units a tenant gets at once."""
    taking = [asyncio.create_task(units.acquire(tenant, 1)) for _ in range(wanted)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    num = sum(task.done() for task in taking)
    for task in taking:
        task.cancel()
    await asyncio.gather(*taking, return_exceptions=True)
    return num


@pytest.mark.parametrize("has_its_turn", [False, True])
async def test_who_is_cancelled_holds_nothing(has_its_turn: bool) -> None:
    units = FairSemaphore(2, Clients())
    units.take("a", 2)
    waiting = asyncio.create_task(units.acquire("b", 2))
    await asyncio.sleep(0)
    if has_its_turn:
        units.release("a", 2)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    if not has_its_turn:
        units.release("a", 2)
    # Two are free, and no more than two.
    assert await num_taken(units, "c", 3) == 2


async def test_last_unit_is_for_another_tenant() -> None:
    units = FairSemaphore(3, Clients(), kept_free=1)
    assert await num_taken(units, "a", 3) == 2
    assert await num_taken(units, "b", 3) == 1


async def test_tenant_that_wanted_nothing_for_long_has_saved_no_turns() -> None:
    clients, order = Clients(), list[str]()
    units = FairSemaphore(1, clients)
    clients.account("busy").counter = 100.0
    units.take("busy", 1)

    async def use(tenant: str) -> None:
        await units.acquire(tenant, 1)
        order.append(tenant)
        clients.account(tenant).counter += 60.0
        units.release(tenant, 1)

    using = [asyncio.create_task(use(tenant)) for tenant in ("busy", "busy", "idle", "idle", "idle")]
    await asyncio.sleep(0)
    units.release("busy", 1)
    await asyncio.gather(*using)
    assert order == ["busy", "idle", "busy", "idle", "idle"]
