"""Kill and freeze ranks of workers that are groups: requests go on elsewhere, and the groups come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ops.stack.process_tree import children_of
from tests.chaos.texts import FREE, stream_texts
from tests.integration.system import System, running_system

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TEXTS = 24
NUM_AT_ONCE = 6
MAX_TOKENS = 60


@pytest.fixture
def two_groups(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--workers", "2", "--tensor-parallel-size", "2", "--num-threads", "1") as running:
        yield running


def ranks_of(worker: int) -> list[int]:
    """Return the processes of a worker's other ranks."""
    return [pid for pid in children_of(worker) if b"ranks.member" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def all_texts(client: openai.AsyncOpenAI, model: str, begun: asyncio.Semaphore) -> list[str]:
    """Stream texts of which half are greedy, and half drawn."""

    def body(index: int) -> dict[str, Any]:
        return {"model": model, "temperature": index % 2, "max_tokens": MAX_TOKENS, "extra_body": FREE}

    return await stream_texts(client, NUM_TEXTS, begun, num_at_once=NUM_AT_ONCE, body=body)


def hurt_rank(system: System, place: int, number: signal.Signals) -> int:
    """Hurt a rank of one of two groups, when there are two, and wait until it is gone: who is frozen is killed."""
    while system.metrics().count("\nvllm:num_requests_running{") < 2:
        time.sleep(0.1)
    (rank,) = ranks_of(system.info["pids"]["worker"][place])
    os.kill(rank, number)
    since = time.monotonic()
    while Path(f"/proc/{rank}").exists():
        time.sleep(0.02)
        assert time.monotonic() - since < 3
    return rank


async def hurt_now_and_then(system: System, begun: asyncio.Semaphore) -> list[int]:
    """Hurt a rank each time that some more texts have begun, but only while there are two groups; return whom."""
    hurt: list[int] = []
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for _ in range(NUM_AT_ONCE):
            await begun.acquire()
        hurt.append(await asyncio.to_thread(hurt_rank, system, len(hurt) % 2, number))
    return hurt


async def test_texts_stay_the_same_when_ranks_are_frozen_and_killed(two_groups: System) -> None:
    async with two_groups.async_client(timeout=240.0) as client:
        undisturbed = await all_texts(client, two_groups.model, asyncio.Semaphore(0))
        begun = asyncio.Semaphore(0)
        disturbed, hurt = await asyncio.gather(
            all_texts(client, two_groups.model, begun), hurt_now_and_then(two_groups, begun)
        )
    assert disturbed == undisturbed
    assert len(hurt) == 2
    assert two_groups.gauge("headrace_redispatches_total") >= 2
