"""Prompts computed by one worker and answers by another, through the whole system: killed, full, and with one alone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.system import System, running_system
from tests.waiting import wait_for

_log = logging.getLogger(__name__)
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

CODE = "\n".join(f"def function_{number}(value):\n    return value * {number} + {number % 7}\n" for number in range(20))
PEER_HITS = 'headrace_worker_kv_tier_hit_tokens_total{model="headrace-demo",tier="peer"'
NUM_TOKENS = 40
NUM_RESTARTS = 100
RESTART_S = 300.0
"""On cores that others have, a worker takes a minute to load."""
Begun = asyncio.Queue[float]
"""When each of several streams had its first token."""
# A busy machine would refuse some.
PATIENT = ("--interactive-ttft-slo-s", "600")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("disaggregation")
    roles = ("--workers", "2", "--roles", "prefill,decode", "--num-threads", "1", "--max-num-seqs", "4")
    with running_system(folder, *roles, *PATIENT, "--kv-lease-s", "5") as running:
        wait_for_all(running)
        yield running


def wait_for_all(system: System) -> None:
    """Wait until a prefill worker hands over: its own answers do."""
    wait_for(lambda: len(system.info["pids"]["worker"]) == 2, 120)
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


async def stream(client: openai.AsyncOpenAI, request: dict[str, Any], begun: Begun | None = None) -> str:
    parts = []
    async for chunk in await client.completions.create(**request, stream=True):
        if not parts and begun is not None:
            begun.put_nowait(time.monotonic())
        parts.append(chunk.choices[0].text)
    return "".join(parts)


async def texts(system: System, prompts: list[str], begun: Begun | None = None) -> list[str]:
    async with system.async_client(timeout=300.0) as client:
        requests = [body(system, prompt) for prompt in prompts]
        return list(await asyncio.gather(*(stream(client, request, begun) for request in requests)))


def prompts(name: str, count: int) -> list[str]:
    """Return prompts that no other test has."""
    return [f"# {name} {number}\n{CODE}" for number in range(count)]


async def killed(system: System, asked: list[str], victim: int) -> list[str]:
    """Return texts amid which a worker was killed, as soon as its successor has its role."""
    begun: Begun = asyncio.Queue()
    pid = system.info["pids"]["worker"][victim]

    async def kill() -> float:
        for _ in range(2):
            await begun.get()
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    told, killed_at = await asyncio.gather(texts(system, asked, begun), kill())
    later = [round(begun.get_nowait() - killed_at, 2) for _ in range(begun.qsize())]
    _log.info("first tokens came %s s after the SIGKILL", later)
    await asyncio.to_thread(wait_for, lambda: pid not in system.info["pids"]["worker"], 60)
    await asyncio.to_thread(wait_for_all, system)
    return told


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One worker that knows of no roles."""
    settings = ("--num-threads", "1", "--max-num-seqs", "4", *PATIENT)
    with running_system(tmp_path_factory.mktemp("alone"), *settings) as running:
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
@pytest.mark.timeout(7200)
async def test_restarts_of_either_side_under_load_change_no_text(system: System, alone: System) -> None:
    is_over = asyncio.Event()
    num_told = 0

    async def ask_on(number: int, client: openai.AsyncOpenAI, of_one: openai.AsyncOpenAI) -> None:
        nonlocal num_told
        while not is_over.is_set():
            # Always a new one, whose KV no worker has.
            asked = f"# restart {number} {num_told} {time.time()}\n{CODE}"
            assert await stream(client, body(system, asked)) == await stream(of_one, body(alone, asked))
            num_told += 1

    def kill(victim: int) -> None:
        """Kill a worker, and wait until KV goes from one to the other again."""
        pid, hits = system.info["pids"]["worker"][victim], 0.0
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: pid not in (pids := system.info["pids"]["worker"]) and len(pids) == 2, RESTART_S)

        def is_fetching() -> bool:
            nonlocal hits
            before, hits = hits, system.gauge(PEER_HITS)
            # It falls when a worker that has died is forgotten.
            return hits > before

        hits = system.gauge(PEER_HITS)
        wait_for(is_fetching, RESTART_S)

    async def kill_all() -> None:
        for number in range(NUM_RESTARTS):
            await asyncio.to_thread(kill, number % 2)
            _log.info("restart %d of %d, %d answers", number + 1, NUM_RESTARTS, num_told)
        is_over.set()

    async with (
        system.async_client(timeout=120.0) as client,
        alone.async_client(timeout=120.0) as of_one,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(6):
            tasks.create_task(ask_on(number, client, of_one))
        tasks.create_task(kill_all())
    assert num_told > NUM_RESTARTS
