"""Hostile schemas in a row: each costs little, and is refused with the reason; another's stream goes on as before."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import psutil
import pytest

from tests.integration.system import System

NUM_ROUNDS = 6
WINDOW_S = 2.0
RATE_PER_S = 10.0
# One after the other, every kind twice.
NUM_ALONE = 18
MAX_CHECK_S = 0.25
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
    """One stream after the other, whose tokens are counted."""

    def __init__(self, client: httpx2.AsyncClient, model: str) -> None:
        self.num_tokens = 0
        self._client = client
        self._body = {"model": model, "prompt": "x", "max_tokens": 2_000, "stream": True, "ignore_eos": True}

    async def run(self) -> None:
        while True:
            async with self._client.stream("POST", "/v1/completions", json=self._body, timeout=120) as answer:
                async for line in answer.aiter_lines():
                    self.num_tokens += line.startswith("data: {")

    async def itl_s(self, client: httpx2.AsyncClient, bodies: Iterator[bytes]) -> float:
        """Return the mean time between tokens while `bodies` are sent at a steady rate."""
        tasks: list[asyncio.Task[httpx2.Response]] = []
        begin, before = time.perf_counter(), self.num_tokens
        for number in range(int(WINDOW_S * RATE_PER_S)):
            tasks.append(asyncio.create_task(_answered(client, next(bodies))))
            await asyncio.sleep(max(0.0, begin + (number + 1) / RATE_PER_S - time.perf_counter()))
        num_tokens, span = self.num_tokens - before, time.perf_counter() - begin
        await asyncio.gather(*tasks)
        return span / num_tokens


async def _answered(client: httpx2.AsyncClient, body: bytes) -> httpx2.Response:
    """Expect a refusal, or the message that the check still goes on."""
    answer = await client.post("/v1/completions", content=body, timeout=60)
    assert answer.json()["error"]["message"]
    if answer.status_code != 400:
        assert answer.status_code in (429, 503), answer.text[:300]
        assert answer.json()["error"]["code"] in ("too_many_grammars", "grammar_not_checked")
        assert int(answer.headers.get("retry-after", 0)) >= 1, answer.text[:300]
    return answer


async def _refused(client: httpx2.AsyncClient, body: bytes) -> None:
    """Come back until the reason is there."""
    for _ in range(20):
        answer = await _answered(client, body)
        if answer.status_code == 400:
            return
        await asyncio.sleep(float(answer.headers["retry-after"]))
    raise AssertionError("its check does not end")


def checked_s(system: System) -> float:
    """Return the processor time of the processes that check grammars: how long they take depends on the machine."""
    total = 0.0
    for gateway in map(psutil.Process, system.info["pids"]["gateway"]):
        for child in gateway.children(recursive=True):
            times = child.cpu_times()
            total += times.user + times.system
        ended = gateway.cpu_times()
        total += ended.children_user + ended.children_system
    return total


@pytest.mark.slow
async def test_hostile_schemas_are_refused_cheaply_and_cost_a_neighbour_little(simulated: System) -> None:
    """Compared with bodies of the same size, sent as often, that are refused for a wrong field before any check."""
    settings: dict[str, Any] = {"base_url": simulated.url, "headers": simulated.headers()}
    asked = {"model": simulated.model, "prompt": "x", "max_tokens": 1}
    num_bodies = int((NUM_ROUNDS + 1) * WINDOW_S * RATE_PER_S) + NUM_ALONE
    fields = list(itertools.islice(hostile_bodies(), num_bodies))
    hostile = iter([json.dumps({**asked, **each}).encode() for each in fields])
    wrong = iter([json.dumps({**asked, **each, "n": 0}).encode() for each in fields])
    spent, ratios, together_s = [], [], 0.0
    async with httpx2.AsyncClient(**settings) as client, httpx2.AsyncClient(**settings) as other:
        neighbour = Neighbour(client, simulated.model)
        streaming = asyncio.create_task(neighbour.run())
        await neighbour.itl_s(other, hostile)
        for body in itertools.islice(hostile, NUM_ALONE):
            before_s = checked_s(simulated)
            await _refused(other, body)
            spent.append(checked_s(simulated) - before_s)
        for _ in range(NUM_ROUNDS):
            quiet = await neighbour.itl_s(other, wrong)
            before_s = checked_s(simulated)
            ratios.append(await neighbour.itl_s(other, hostile) / quiet)
            together_s += checked_s(simulated) - before_s
        streaming.cancel()
    ratio, mean_s = statistics.median(ratios), together_s / (NUM_ROUNDS * WINDOW_S * RATE_PER_S)
    figures = f"checks of {max(spent):.3f} s at most, {mean_s:.3f} s in the mean; ITL times {ratio:.3f}, {ratios}"
    assert sum(spent) > 0, figures
    assert max(*spent, mean_s) <= MAX_CHECK_S, figures
    assert ratio <= MAX_ITL_RATIO, figures
