"""Told times on the real system: who returns exactly when told is admitted, while newcomers keep arriving."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx2
import pytest

from tests.integration.system import System, running_system

STEP_S = 0.02
NUM_SLOTS = 4
MAX_TOKENS = 40
CAPACITY = NUM_SLOTS / (MAX_TOKENS * STEP_S)
OVERLOAD = 4
ARRIVAL_S = 8.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system that runs four sequences at a time, 20 ms a step, and promises a first token within 2 s."""
    environ = {"HEADRACE_MAX_NUM_SEQS": str(NUM_SLOTS), "HEADRACE_INTERACTIVE_TTFT_SLO_S": "2"}
    with running_system(tmp_path_factory.mktemp("small"), "--simulate", str(STEP_S * 1000), environ=environ) as running:
        yield running


@dataclass
class Returns:
    """Of those who returned exactly when told, by what they had been told: seconds and whether they were admitted."""

    booked: list[tuple[int, bool]] = field(default_factory=list)
    line: list[tuple[int, bool]] = field(default_factory=list)


async def _persist(http: httpx2.AsyncClient, model: str, number: int, returns: Returns) -> None:
    """Ask until admitted, returning exactly when told."""
    body = {"model": model, "prompt": f"# {number}\nx = ", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    told: tuple[str, int] | None = None
    for _ in range(20):
        answer = await http.post("/v1/completions", json=body)
        if told is not None:
            getattr(returns, told[0]).append((told[1], answer.status_code == 200))
        if answer.status_code == 200:
            return
        assert answer.status_code == 503
        assert answer.headers["x-headrace-ticket"]
        told = answer.headers["x-headrace-place"], int(answer.headers["retry-after"])
        await asyncio.sleep(told[1])
    raise AssertionError(f"request {number} was never admitted")


@pytest.mark.slow
async def test_nine_in_ten_who_return_when_told_are_admitted(small: System) -> None:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=small.url, headers=small.headers(), timeout=120, limits=limits) as http:
        model = small.model
        # The fleet's rates and the length of answers are known afterwards.
        await asyncio.gather(*(_persist(http, model, -1 - number, Returns()) for number in range(12)))
        returns = Returns()
        clients = []
        for number in range(int(OVERLOAD * CAPACITY * ARRIVAL_S)):
            clients.append(asyncio.create_task(_persist(http, model, number, returns)))
            await asyncio.sleep(1 / (OVERLOAD * CAPACITY))
        await asyncio.gather(*clients)
    shares = {}
    for low, high in ((0, 10), (10, 20), (20, 61)):
        admitted = [is_admitted for told_s, is_admitted in returns.booked if low <= told_s < high]
        assert len(admitted) >= 10, returns
        shares[low] = sum(admitted) / len(admitted)
    assert min(shares.values()) >= 0.9, (shares, returns)
