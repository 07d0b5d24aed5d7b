"""Kill Redis and NATS under a running system."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.integration.system import System, running_system

GIVE_UP_S = 15.0

pytestmark = [pytest.mark.chaos]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--simulate", "10") as running:
        yield running


def _ask(system: System, text: str = "x = ") -> str:
    answer = system.client().completions.create(model=system.model, prompt=text, max_tokens=4, temperature=0)
    return answer.choices[0].text


def _is_served(system: System) -> bool:
    try:
        _ask(system)
    except openai.APIStatusError as error:
        if error.status_code in {503, 504}:
            return False
        raise
    return True


@pytest.mark.slow
def test_killed_redis_causes_no_error(stack: System) -> None:
    before = _ask(stack, "a")
    os.kill(stack.info["pids"]["redis"][0], signal.SIGKILL)
    for _ in range(20):
        assert _ask(stack, "a") == before
        assert _ask(stack, "b")


@pytest.mark.slow
def test_restarted_nats_ends_streams_explicitly_and_serves_again_within_5_s(stack: System) -> None:
    outcomes: list[str] = []

    def stream() -> None:
        try:
            chunks = stack.client().completions.create(
                model=model, prompt="y = ", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            finish = None
            for chunk in chunks:
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
            outcomes.append(finish or "silent")
        except openai.APIError:
            outcomes.append("error")

    model = stack.model
    threads = [threading.Thread(target=stream) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    os.kill(stack.info["pids"]["nats"][0], signal.SIGKILL)
    killed = time.monotonic()
    while not _is_served(stack) and time.monotonic() - killed < GIVE_UP_S:
        time.sleep(0.1)
    recovery_s = time.monotonic() - killed
    for thread in threads:
        thread.join(30)
    assert recovery_s < 5
    assert len(outcomes) == 8
    assert "silent" not in outcomes
