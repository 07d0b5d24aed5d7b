"""Background responses while each process of the system is killed in turn: every one ends, and as it would have."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import openai
import pytest
from openai.types.responses import Response

from tests.integration.system import System, running_system

NUM_RESPONSES = 6
NUM_TOKENS = 150
VICTIMS = ("worker", "gateway", "nats", "worker", "redis")
GIVE_UP_S = 60.0

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(240)]

Result = TypeVar("Result")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--simulate", "10", "--workers", "2") as running:
        yield running


def _until(action: Callable[..., Result | None], *arguments: object) -> Result:
    """Repeat what may fail while a process is away, until it returns something."""
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        try:
            result = action(*arguments)
            if result is not None:
                return result
        except (openai.APIConnectionError, openai.InternalServerError):
            pass
        time.sleep(0.1)
    raise TimeoutError(action, arguments)


def _queue(client: openai.OpenAI, model: str, text: str) -> str:
    return client.responses.create(
        model=model,
        input=text,
        background=True,
        max_output_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    ).id


def _begun(client: openai.OpenAI, response_id: str) -> Response | None:
    response = client.responses.retrieve(response_id)
    return None if response.status == "queued" else response


def _ended(client: openai.OpenAI, response_id: str) -> Response | None:
    response = client.responses.retrieve(response_id)
    return None if response.status in ("queued", "in_progress") else response


def test_no_background_response_is_lost_when_each_process_is_killed_in_turn(stack: System) -> None:
    client, model = stack.client(), stack.model
    expected = {text: _whole(client, model, text) for text in map(str, range(NUM_RESPONSES))}
    queued: dict[str, str] = {}
    for victim in VICTIMS:
        for text in expected:
            queued[_until(_queue, client, model, text)] = text
        _until(_begun, client, next(iter(reversed(queued))))
        os.kill(stack.info["pids"][victim][0], signal.SIGKILL)
    ended = {response_id: _until(_ended, client, response_id) for response_id in queued}
    assert len(ended) == NUM_RESPONSES * len(VICTIMS)
    assert {response.status for response in ended.values()} == {"incomplete"}
    wrong = [queued[each] for each, response in ended.items() if response.output_text != expected[queued[each]]]
    assert wrong == []
    events = list(client.responses.retrieve(next(iter(queued)), stream=True, starting_after=10))
    assert events[0].sequence_number == 11
    assert events[-1].type == "response.incomplete"


def _whole(client: openai.OpenAI, model: str, text: str) -> str:
    return client.responses.create(
        model=model, input=text, max_output_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
    ).output_text
