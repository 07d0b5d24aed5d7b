"""Tokenizing the longest texts in a loop beside people who wait for their first token."""

from __future__ import annotations

import asyncio
import statistics
import time

import httpx2
import pytest

from tests.integration.system import System

TEXT = "def f(x): return x + 1\n" * 11_000
NUM_LOOPS = 4
NUM_ROUNDS = 6
REQUESTS_A_ROUND = 12


async def _first_token_s(http: httpx2.AsyncClient, model: str, number: int) -> float:
    body = {"model": model, "prompt": f"# {number}\nx = ", "max_tokens": 2, "stream": True}
    started = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_raw():
            return time.perf_counter() - started
    raise AssertionError("no token")


async def _tokenize_for_ever(http: httpx2.AsyncClient, statuses: list[int]) -> None:
    while True:
        answer = await http.post("/tokenize", json={"prompt": TEXT})
        statuses.append(answer.status_code)
        if answer.status_code == 503:
            await asyncio.sleep(int(answer.headers["retry-after"]))


@pytest.mark.slow
async def test_first_tokens_come_as_soon_beside_a_loop_of_the_longest_texts(system: System) -> None:
    alone: list[float] = []
    beside: list[float] = []
    statuses: list[int] = []
    async with httpx2.AsyncClient(base_url=system.url, headers=system.headers(), timeout=60) as http:
        model = system.model
        for number in range(5):
            await _first_token_s(http, model, number)
        # In turns, so that what else the machine does weighs on both alike.
        for _ in range(NUM_ROUNDS):
            alone += [await _first_token_s(http, model, number) for number in range(REQUESTS_A_ROUND)]
            loops = [asyncio.create_task(_tokenize_for_ever(http, statuses)) for _ in range(NUM_LOOPS)]
            await asyncio.sleep(0.3)
            beside += [await _first_token_s(http, model, number) for number in range(REQUESTS_A_ROUND)]
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await asyncio.sleep(0.5)
    assert statuses.count(200) > 0
    assert set(statuses) <= {200, 503}
    assert statistics.median(beside) <= 1.2 * statistics.median(alone) + 0.010, (sorted(alone), sorted(beside))
