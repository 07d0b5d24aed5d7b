"""Prompts computed by one worker and answers by another, through the whole system: killed, full, and with one alone."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.integration.system import System, running_system
from tests.waiting import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

CODE = "\n".join(f"def function_{number}(value):\n    return value * {number} + {number % 7}\n" for number in range(20))
PEER_HITS = 'headrace_worker_kv_tier_hit_tokens_total{model="headrace-demo",tier="peer"'
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("disaggregation")
    roles = ("--workers", "2", "--roles", "prefill,decode", "--num-threads", "1", "--max-num-seqs", "4")
    with running_system(folder, *roles, "--kv-lease-s", "5") as running:
        wait_for_all(running)
        yield running


def wait_for_all(system: System, num_workers: int = 2) -> None:
    """Wait until a prefill worker hands over: its own answers do."""
    wait_for(lambda: len(system.info["pids"]["worker"]) == num_workers, 120)
    before = system.gauge(PEER_HITS)
    wait_for(lambda: ask(system, f"# {time.time()}\n{CODE}") and system.gauge(PEER_HITS) > before, 120)


def ask(system: System, prompt: str) -> str:
    answer = system.client().completions.create(**body(system, prompt))
    return answer.choices[0].text


def body(system: System, prompt: str, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return {
        "model": system.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
        "extra_headers": {"Cache-Control": "no-cache"},
    }


async def stream(client: openai.AsyncOpenAI, request: dict[str, Any], begun: asyncio.Semaphore | None = None) -> str:
    parts = []
    async for chunk in await client.completions.create(**request, stream=True):
        if not parts and begun is not None:
            begun.release()
        parts.append(chunk.choices[0].text)
    return "".join(parts)


async def texts(
    system: System, prompts: list[str], begun: asyncio.Semaphore | None = None, names: list[str] | None = None
) -> list[str]:
    async with system.async_client(timeout=300.0) as client:
        requests = [body(system, prompt) for prompt in prompts]
        for request, name in zip(requests, names or (), strict=False):
            request["extra_headers"] |= {"x-request-id": name}
        return list(await asyncio.gather(*(stream(client, request, begun) for request in requests)))


def prompts(name: str, count: int) -> list[str]:
    """Return prompts that no other test has."""
    return [f"# {name} {number}\n{CODE}" for number in range(count)]


async def killed(system: System, asked: list[str], victim: int) -> list[str]:
    """Return texts amid which a worker was killed, as soon as its successor has its role."""
    begun = asyncio.Semaphore(0)
    pid = system.info["pids"]["worker"][victim]

    async def kill() -> None:
        for _ in range(2):
            await begun.acquire()
        os.kill(pid, signal.SIGKILL)

    told, _ = await asyncio.gather(texts(system, asked, begun), kill())
    await asyncio.to_thread(wait_for, lambda: pid not in system.info["pids"]["worker"], 60)
    await asyncio.to_thread(wait_for_all, system)
    return told


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One worker that knows of no roles."""
    with running_system(tmp_path_factory.mktemp("alone"), "--num-threads", "1", "--max-num-seqs", "4") as running:
        yield running


@pytest.mark.slow
async def test_streams_are_those_of_one_worker_and_more_of_them_than_slots_wait(system: System, alone: System) -> None:
    asked = prompts("many", 64)
    before = system.gauge(PEER_HITS)
    told = await texts(system, asked)
    assert told == await texts(alone, asked)
    assert system.gauge(PEER_HITS) > before


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["prefill", "decode"])
async def test_a_worker_that_is_killed_loses_nothing(system: System, alone: System, victim: int) -> None:
    asked = prompts(f"killed {victim}", 8)
    assert await killed(system, asked, victim) == await texts(alone, asked)


@pytest.mark.slow
async def test_prompts_of_a_killed_prefill_worker_are_soon_computed_by_another(tmp_path: Path) -> None:
    roles = ("--workers", "3", "--roles", "prefill,prefill,decode", "--num-threads", "1")
    with running_system(tmp_path, *roles) as system:
        wait_for_all(system, 3)
        again_s: list[float] = []
        while len(again_s) < 5:
            names = [f"again-{time.time()}-{number}" for number in range(2)]
            asking = asyncio.create_task(texts(system, [f"# {name}\n{CODE * 2}" for name in names], names=names))
            await asyncio.to_thread(wait_for, lambda names=names: all(attempts(system, name) for name in names))
            killed_at = time.time()
            os.kill(system.info["pids"]["worker"][0], signal.SIGKILL)
            assert all(await asking)
            again_s += [ended - killed_at for name in names for ended in prefilled_again(system, name)]
            await asyncio.to_thread(wait_for_all, system, 3)
    assert min(again_s) < 10.0, sorted(again_s)


def attempts(system: System, name: str) -> list[dict[str, Any]]:
    """Return the attempts at a request that workers have claimed, with Unix seconds."""
    place = system.info["metrics_url"].replace("/metrics", f"/console/api/requests/{name}")
    answer = httpx2.get(place, headers={"Authorization": f"Bearer {system.info['operator_key']}"})
    if answer.status_code != 200:
        return []
    timeline = answer.json()["requests"][0]["timeline"]
    found = [each for life in timeline.get("sequences", ()) for each in life["attempts"]]
    began = timeline["began"]
    return [each | {"ended": began + each.get("ended_s", 0.0)} for each in found if each.get("claimed_s") is not None]


def prefilled_again(system: System, name: str) -> list[float]:
    """Return when the prompt of a request was computed whose worker had died before it was, if one has."""
    told = attempts(system, name)
    return [
        later["ended"]
        for lost, later in itertools.pairwise(told)
        if lost["end"] == "worker_dead" and not lost.get("tokens") and later["end"] == "prefilled"
    ]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
async def test_restarts_under_load_change_no_text(system: System, alone: System, victim: int) -> None:
    num_restarts = int(os.environ.get("NUM_RESTARTS", "20"))
    for number in range(num_restarts):
        asked = prompts(f"restart {victim} {number}", 8)
        assert await killed(system, asked, victim) == await texts(alone, asked)
