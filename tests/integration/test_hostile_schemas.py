"""Hostile schemas in a row: each is refused with the reason, soon, and another tenant's stream goes on as before."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.integration.system import System

NUM_ROUNDS = 6
WINDOW_S = 2.0
NUM_HOSTILE_CLIENTS = 2
MAX_REFUSAL_S = 0.25
MAX_ITL_RATIO = 1.05


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def doubling(number: int) -> str:
    lexemes = "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(400 + number % 1_000))
    return f'start: A0\n{lexemes}A{400 + number % 1_000}: "z"\n'


def hostile_bodies() -> Iterator[dict[str, Any]]:
    """Yield fields that are refused, none equal to another."""
    for number in itertools.count():
        cycle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
        wide = {f"p{number}_{index}": {"type": "integer"} for index in range(900)}
        yield {"json_schema": {**cycle, "title": str(number)}}
        yield {"json_schema": {"$ref": f"https://example.org/{number}.json"}}
        yield {"guided_json": nested(200 + number % 5_000)}
        yield {"guided_json": {"enum": [f"{number}-{index}" for index in range(10_000)]}}
        yield {"guided_json": {"description": "x" * 300_000 + str(number)}}
        yield {"guided_json": {"anyOf": [{"properties": wide, "title": str(index)} for index in range(12)]}}
        yield {"guided_grammar": doubling(number)}
        yield {"guided_regex": "(" * 2_000 + str(number)}
        yield {"grammar": f'root ::= a{number}\na{number} ::= "a"{{2000}} (a{number + 1})'}


class Neighbour:
    """A stream whose events are timed."""

    def __init__(self, client: httpx2.AsyncClient, model: str) -> None:
        self.times: list[float] = []
        self._client = client
        self._body = {"model": model, "prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}

    async def run(self) -> None:
        async with self._client.stream("POST", "/v1/completions", json=self._body, timeout=120) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())

    def gaps(self, begin: float, end: float) -> list[float]:
        times = [each for each in self.times if begin <= each < end]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


async def refuse_until(
    client: httpx2.AsyncClient, model: str, bodies: Iterator[dict[str, Any]], end: float
) -> list[float]:
    """Send hostile bodies until loop time `end`; return how long each refusal took."""
    took = []
    while time.perf_counter() < end:
        content = json.dumps({"model": model, "prompt": "x", "max_tokens": 1, **next(bodies)})
        begun = time.perf_counter()
        answer = await client.post("/v1/completions", content=content, timeout=60)
        took.append(time.perf_counter() - begun)
        assert answer.status_code == 400, answer.text[:300]
        assert answer.json()["error"]["message"]
    return took


@pytest.mark.slow
async def test_hostile_schemas_are_refused_soon_and_cost_a_neighbour_little(simulated: System) -> None:
    settings: dict[str, Any] = {"base_url": simulated.url, "headers": simulated.headers()}
    model = simulated.model
    bodies = hostile_bodies()
    quiet: list[float] = []
    beside: list[float] = []
    took: list[float] = []
    async with httpx2.AsyncClient(**settings) as client, httpx2.AsyncClient(**settings) as other:
        neighbour = Neighbour(client, model)
        streaming = asyncio.create_task(neighbour.run())
        await refuse_until(other, model, bodies, time.perf_counter() + 1)
        for _ in range(NUM_ROUNDS):
            begin = time.perf_counter()
            await asyncio.sleep(WINDOW_S)
            quiet += neighbour.gaps(begin, begin + WINDOW_S)
            begin = time.perf_counter()
            attacks = [refuse_until(other, model, bodies, begin + WINDOW_S) for _ in range(NUM_HOSTILE_CLIENTS)]
            took += itertools.chain(*await asyncio.gather(*attacks))
            beside += neighbour.gaps(begin, begin + WINDOW_S)
        streaming.cancel()
    ratio = statistics.median(beside) / statistics.median(quiet)
    slow = statistics.quantiles(took, n=20)[-1]
    figures = f"{len(took)} refusals, p50 {statistics.median(took):.3f} s, p95 {slow:.3f} s; ratio of ITLs {ratio:.3f}"
    assert ratio <= MAX_ITL_RATIO, figures
    assert statistics.median(took) <= MAX_REFUSAL_S, figures
