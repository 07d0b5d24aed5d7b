"""Kill and freeze ranks of workers that are groups: requests go on elsewhere, and only the rank is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

from ops.stack.child import children_of
from tests.chaos.texts import FREE, stream_texts
from tests.integration.system import System, running_system
from tests.waiting import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_TEXTS = 1000
NUM_AT_ONCE = 12
MAX_TOKENS = 24
WOUNDS = (signal.SIGSTOP, signal.SIGKILL) * 3


@pytest.fixture
def two_groups(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--workers", "2", "--tensor-parallel-size", "2", "--num-threads", "1") as running:
        yield running


def ranks_of(worker: int) -> list[int]:
    found = []
    for pid in children_of(worker):
        # One that was just killed may be gone by now.
        with contextlib.suppress(OSError):
            if b"ranks.member" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


async def all_texts(
    client: openai.AsyncOpenAI, model: str, begun: asyncio.Semaphore, silences: list[float] | None = None
) -> list[str]:
    """Stream texts of which half are greedy, and half drawn."""

    def body(index: int) -> dict[str, Any]:
        return {"model": model, "temperature": index % 2, "max_tokens": MAX_TOKENS, "extra_body": FREE}

    return await stream_texts(client, NUM_TEXTS, begun, num_at_once=NUM_AT_ONCE, body=body, silences=silences)


def ready(system: System) -> list[bool]:
    """Say of each worker whether it takes requests."""
    lines = [line for line in system.metrics().splitlines() if line.startswith("headrace_worker_draining{")]
    return [not float(line.rpartition(" ")[2]) for line in lines]


def loads(system: System, rank: int) -> list[float]:
    """Return how often the weights of a rank were read, of each worker."""
    lines = [line for line in system.metrics().splitlines() if line.startswith("headrace_worker_rank_loads_total{")]
    return [float(line.rpartition(" ")[2]) for line in lines if f'rank="{rank}"' in line]


def both_serve(system: System) -> bool:
    return len(served := ready(system)) == 2 and all(served)


def hurt_rank(system: System, place: int, number: signal.Signals) -> float:
    """Hurt a rank of one of two groups, when both serve; return for how long it has had no successor."""
    wait_for(lambda: both_serve(system), 60)
    (rank,) = ranks_of(system.info["pids"]["worker"][place])
    os.kill(rank, number)
    since = time.monotonic()
    while ranks_of(system.info["pids"]["worker"][place]) in ([rank], []):
        time.sleep(0.02)
        assert time.monotonic() - since < 3
    replaced_s = time.monotonic() - since
    wait_for(lambda: not both_serve(system))
    return replaced_s


async def hurt_now_and_then(system: System, begun: asyncio.Semaphore, random: Random) -> list[float]:
    """Hurt a rank each time that some more texts have begun."""
    times: list[float] = []
    for number in WOUNDS:
        for _ in range(NUM_TEXTS // (len(WOUNDS) + 2)):
            await begun.acquire()
        times.append(await asyncio.to_thread(hurt_rank, system, random.randrange(2), number))
    return times


async def test_texts_stay_the_same_when_ranks_are_frozen_and_killed(two_groups: System) -> None:
    workers = two_groups.info["pids"]["worker"]
    async with two_groups.async_client(timeout=600.0) as client:
        undisturbed = await all_texts(client, two_groups.model, asyncio.Semaphore(0))
        begun, silences = asyncio.Semaphore(0), list[float]()
        disturbed, times = await asyncio.gather(
            all_texts(client, two_groups.model, begun, silences), hurt_now_and_then(two_groups, begun, Random(7))
        )
    assert disturbed == undisturbed
    assert two_groups.gauge("headrace_redispatches_total") >= len(WOUNDS) / 2
    sys.stdout.write(f"replaced after {times} s; the longest silences of streams: {sorted(silences)[-6:]} s\n")
    assert max(silences) < 3, "the other group goes on within 1.5 s, or a little later on a busy machine"
    wait_for(lambda: both_serve(two_groups), 60)
    assert sorted(loads(two_groups, rank=0)) == [1, 1]
    assert sum(loads(two_groups, rank=1)) == 2 + len(WOUNDS)
    # The workers are the same processes, whose own weights were read once.
    assert two_groups.info["pids"]["worker"] == workers
    assert two_groups.log.read_text().count("the group of ranks serves again") == len(WOUNDS)
