"""Kill workers in mid-stream: the client's text must be byte-identical to an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.system import System, running_system

pytestmark = [pytest.mark.chaos]

PROMPT = "import os\n\n\ndef list_files(path):\n"
NUM_STREAMS = 6
MAX_TOKENS = 200
MAX_ROUNDS = 4
# No document of it ends within `MAX_TOKENS`.
LONG_LIST = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 500}


@pytest.fixture
def two_workers(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--workers", "2") as running:
        yield running


@pytest.fixture
def two_simulated_workers(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--workers", "2", "--simulate", "10") as running:
        yield running


def _stream(system: System, index: int, texts: dict[int, list[str]], finishes: dict[int, str | None]) -> None:
    """Stream a text; with an odd index one that keeps to a schema."""
    output = {"guided_json": LONG_LIST} if index % 2 else {"ignore_eos": True}
    chunks = system.client().completions.create(
        model=system.model,
        prompt=f"{PROMPT}    # variant {index}\n",
        max_tokens=MAX_TOKENS,
        temperature=0.7,
        seed=index,
        stream=True,
        extra_body=output,
        extra_headers={"Cache-Control": "no-cache"},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[index].append(choice.text)
            finishes[index] = choice.finish_reason or finishes[index]


def _run_streams(system: System, disturb: signal.Signals | None) -> tuple[dict[int, str], dict[int, str | None]]:
    texts: dict[int, list[str]] = {index: [] for index in range(NUM_STREAMS)}
    finishes: dict[int, str | None] = dict.fromkeys(range(NUM_STREAMS))
    threads = [threading.Thread(target=_stream, args=(system, index, texts, finishes)) for index in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    if disturb is not None:
        while not all(len(parts) > 3 for parts in texts.values()):
            time.sleep(0.005)
        os.kill(system.info["pids"]["worker"][0], disturb)
    for thread in threads:
        thread.join(60)
    return {index: "".join(parts) for index, parts in texts.items()}, finishes


def _num_redispatches(system: System) -> float:
    lines = system.metrics().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("headrace_redispatches_total"))


def _worker_names(system: System) -> set[str]:
    return set(re.findall(r'^headrace_worker_\w+\{.*worker="([^"]+)"', system.metrics(), re.MULTILINE))


def _wait_for_another(system: System, workers: set[str]) -> None:
    """Wait until a worker is heard of that is none of these: the one that is started for the disturbed one."""
    deadline = time.monotonic() + 60
    while _worker_names(system) <= workers:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _assert_texts_survive(system: System, disturbance: signal.Signals) -> None:
    """Disturb a worker until it held at least one stream: which worker pulls which request is chance."""
    undisturbed, _ = _run_streams(system, None)
    for _ in range(MAX_ROUNDS):
        victim, workers = system.info["pids"]["worker"][0], _worker_names(system)
        try:
            disturbed, finishes = _run_streams(system, disturbance)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
        assert disturbed == undisturbed
        assert set(finishes.values()) == {"length"}
        if _num_redispatches(system) > 0:
            return
        if disturbance is not signal.SIGSTOP:
            _wait_for_another(system, workers)
    pytest.fail("no stream was ever held by the disturbed worker")


def test_sigkilled_worker_leaves_every_text_identical(two_workers: System) -> None:
    _assert_texts_survive(two_workers, signal.SIGKILL)


@pytest.mark.slow
def test_stopped_worker_is_noticed_by_its_silence(two_simulated_workers: System) -> None:
    _assert_texts_survive(two_simulated_workers, signal.SIGSTOP)


@pytest.mark.slow
def test_drained_worker_hands_its_streams_over(two_simulated_workers: System) -> None:
    _assert_texts_survive(two_simulated_workers, signal.SIGTERM)
