"""When a gateway tells Redis what runs: by a store that notes the keys it is asked to state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.admission.limit_account import KeyAccount
from gateway.admission.limits import RENEW_S, RateLimiter
from gateway.metrics import GatewayMetrics


class Stated:
    """A limiter at a time of the test's choice."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.stated: list[str] = []
        self.confirms = True
        self.limiter = RateLimiter(None, GatewayMetrics(), lambda: self.now)
        self.limiter._store = cast("Any", SimpleNamespace(state=self._state))

    async def _state(self, key_id: str, account: KeyAccount) -> bool:
        self.stated.append(key_id)
        return self.confirms

    def account(self, key_id: str, *, running: int, is_counted: bool = True, is_dirty: bool = False) -> KeyAccount:
        """Make the account of a key that was stated just now."""
        account = self.limiter._accounts[key_id]
        account.is_counted, account.is_dirty, account.stated_at = is_counted, is_dirty, self.now
        account.usage.running = running
        for number in range(running):
            account.holds.begin(number, self.now, 1)
        return account

    async def states(self, after_s: float) -> list[str]:
        """Return which keys are stated so long after the last statement."""
        self.stated = []
        self.now = 1_000.0 + after_s
        await self.limiter.state()
        return self.stated


@pytest.fixture
async def stated() -> Stated:
    return Stated()


async def test_what_runs_is_stated_again_when_half_of_the_time_is_over(stated: Stated) -> None:
    stated.account("running", running=2)
    stated.account("unlimited", running=2, is_counted=False)
    stated.account("idle", running=0).usage.record(stated.now, 1, 0)
    assert await stated.states(RENEW_S / 2 - 0.001) == []
    assert await stated.states(RENEW_S / 2) == ["running"]


async def test_what_has_changed_is_stated_at_once_and_until_it_is_confirmed(stated: Stated) -> None:
    stated.account("changed", running=1, is_counted=False, is_dirty=True)
    stated.account("same", running=1)
    stated.confirms = False
    assert not await stated.limiter.state()
    assert stated.stated == ["changed"]
    stated.confirms = True
    assert await stated.limiter.state()
    assert stated.stated == ["changed"] * 2


async def test_accounts_of_which_nothing_is_left_are_forgotten(stated: Stated) -> None:
    stated.account("idle", running=0)
    stated.account("running", running=1)
    used = stated.account("used", running=0)
    used.usage.record(stated.now, 1, 0)
    await stated.states(0.1)
    assert set(stated.limiter._accounts) == {"running", "used"}
    await stated.states(60.0)
    assert set(stated.limiter._accounts) == {"running"}


async def test_gateway_without_redis_has_nothing_to_tell(stated: Stated) -> None:
    account = stated.account("changed", running=1, is_dirty=True)
    stated.limiter._store = None
    assert await stated.limiter.state()
    assert (account.is_dirty, stated.stated) == (False, [])
