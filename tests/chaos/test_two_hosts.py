"""Streams move between a single worker and a group whose ranks are on two hosts, in both directions.

Processes are killed, and the cable of a host is pulled out.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

import ops
from ops.stack.child import children_of
from tests.cable import connected_host
from tests.chaos.test_rank_death import both_serve, loads, ranks_of
from tests.chaos.texts import FREE, stream_texts
from tests.integration.system import System, running_system
from tests.waiting import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
DEMO_MODEL = Path(ops.__file__).parent / "demo_model" / "model"
NUM_TEXTS, NUM_AT_ONCE = 12, 6


@contextmanager
def host(
    system: System, folder: Path, number: int, address: str, port: int, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a host of a group of two as an operator would start it, in a folder of its own, behind a prefix."""
    folder.mkdir()
    options = {
        "HEADRACE_MODEL": str(DEMO_MODEL),
        "HEADRACE_SERVED_MODEL_NAME": system.model,
        "HEADRACE_TENSOR_PARALLEL_SIZE": "2",
        "HEADRACE_NNODES": "2",
        "HEADRACE_NODE_RANK": str(number),
        "HEADRACE_MASTER_ADDR": address,
        "HEADRACE_MASTER_PORT": str(port),
        "HEADRACE_GROUP_TOKEN": "a token of a group in a test",
        "HEADRACE_NUM_THREADS": "1",
        "HEADRACE_WORKER_ID": "group",
        "HEADRACE_NUM_BLOCKS": "2000",
    }
    if number == 0:
        options["HEADRACE_NATS_URL"] = system.info["worker_nats_url"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "ops.cli", "worker"],
            cwd=folder,
            env=os.environ | options | {"PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(40)


async def texts(
    client: openai.AsyncOpenAI, model: str, begun: asyncio.Semaphore, silences: list[float] | None = None
) -> list[str]:
    def body(index: int) -> dict[str, Any]:
        return {"model": model, "temperature": index % 2, "max_tokens": 60, "extra_body": FREE}

    return await stream_texts(client, NUM_TEXTS, begun, num_at_once=NUM_AT_ONCE, body=body, silences=silences)


async def hurt(begun: asyncio.Semaphore, wound: Callable[[], object]) -> None:
    """Hurt the group or the worker when the first texts have begun."""
    for _ in range(NUM_AT_ONCE):
        await begun.acquire()
    await asyncio.to_thread(wound)


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as free:
        return int(free.getsockname()[1])


async def test_texts_stay_the_same_when_they_move_between_a_worker_and_a_group(tmp_path: Path) -> None:
    with ExitStack() as stack:
        system = stack.enter_context(running_system(tmp_path, "--num-threads", "1"))
        at = "127.0.0.1", free_port("127.0.0.1")
        stack.enter_context(host(system, tmp_path / "first", 0, *at))
        second = stack.enter_context(host(system, tmp_path / "second", 1, *at))
        wait_for(lambda: both_serve(system), 90, lambda: (tmp_path / "first" / "log").read_text()[-2000:])
        assert len(ranks_of(second.pid)) == len(children_of(second.pid)) == 1
        async with system.async_client(timeout=200.0) as client:
            undisturbed = await texts(client, system.model, asyncio.Semaphore(0))
            for pid in (system.info["pids"]["worker"][0], ranks_of(second.pid)[0]):
                begun = asyncio.Semaphore(0)
                wound = partial(os.kill, pid, signal.SIGKILL)
                disturbed, _ = await asyncio.gather(texts(client, system.model, begun), hurt(begun, wound))
                assert disturbed == undisturbed
                await asyncio.to_thread(wait_for, lambda: both_serve(system), 60)
        wait_for(lambda: "the group of ranks serves again" in (tmp_path / "first" / "log").read_text(), 60)
        died = [line for line in system.log.read_text().splitlines() if " died with " in line]
        assert any("worker group died with" in line for line in died), died
        assert any("worker group died with" not in line for line in died), died


async def test_texts_stay_the_same_when_the_cable_of_a_host_is_pulled_out(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cable = stack.enter_context(connected_host())
        system = stack.enter_context(running_system(tmp_path, "--num-threads", "1"))
        at = cable.address, free_port(cable.address)
        stack.enter_context(host(system, tmp_path / "first", 0, *at))
        second = stack.enter_context(host(system, tmp_path / "second", 1, *at, cable.there()))
        log = tmp_path / "first" / "log"
        wait_for(lambda: both_serve(system), 90, lambda: log.read_text()[-2000:])
        async with system.async_client(timeout=200.0) as client:
            undisturbed = await texts(client, system.model, asyncio.Semaphore(0))
            (rank,) = ranks_of(second.pid)
            begun, silences = asyncio.Semaphore(0), list[float]()
            disturbed, _ = await asyncio.gather(texts(client, system.model, begun, silences), hurt(begun, cable.pull))
            assert disturbed == undisturbed
            sys.stdout.write(f"the longest silences of streams: {sorted(silences)[-6:]} s\n")
            assert max(silences) < 3, "the worker goes on within 1.5 s, or a little later on a busy machine"
            await asyncio.to_thread(wait_for, lambda: rank not in ranks_of(second.pid), 10)
            assert not both_serve(system)
            cable.plug_in()
            await asyncio.to_thread(wait_for, lambda: both_serve(system), 60)
            assert await texts(client, system.model, asyncio.Semaphore(0)) == undisturbed
        lost = [line for line in log.read_text().splitlines() if "the group of ranks is lost: " in line]
        assert ["of host 1)" in line for line in lost] == [True]
        assert loads(system, rank=0) == [1]
