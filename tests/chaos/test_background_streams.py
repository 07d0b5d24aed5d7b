"""Streams of background responses while processes are killed in mid-stream: each event comes once, and as it was."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.integration.system import System, running_system

NUM_TOKENS = 500
KILLED_AFTER = 6
VICTIMS = ("gateway", "worker", "nats", "redis")
GIVE_UP_S = 90.0
ENDS = ("response.completed", "response.incomplete", "response.failed")
ASKED: dict[str, Any] = {
    "input": "Tell me.",
    "max_output_tokens": NUM_TOKENS,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--simulate", "10", "--workers", "2") as running:
        yield running


class Reader:
    """Reads the events of one response, and goes on after the last of them whenever its stream breaks off."""

    def __init__(self, system: System) -> None:
        self._client = system.client()
        self.events: list[dict[str, Any]] = []
        self.num_streams = 0

    @property
    def response_id(self) -> str:
        response_id: str = self.events[0]["response"]["id"]
        return response_id

    def read(self, stream: Iterable[Any], then: Callable[[], None], after: int) -> None:
        """Read to the end; do something once so many pieces of text have come."""
        deadline, num_deltas = time.monotonic() + GIVE_UP_S, 0
        while True:
            self.num_streams += 1
            with contextlib.suppress(openai.APIError, httpx2.HTTPError):
                for event in stream:
                    self.events.append(event.to_dict())
                    num_deltas += event.type == "response.output_text.delta"
                    if num_deltas == after and event.type == "response.output_text.delta":
                        then()
                    if event.type in ENDS:
                        return
            assert time.monotonic() < deadline, self.events[-1]
            stream = self._resumed()

    def _resumed(self) -> Iterable[Any]:
        last = self.events[-1]["sequence_number"]
        with contextlib.suppress(openai.APIError):
            return self._client.responses.retrieve(self.response_id, stream=True, starting_after=last)
        time.sleep(0.1)
        return ()


def _kill(system: System, victim: str) -> None:
    """Kill all processes of a kind, so that the one that holds the response is among them."""
    for pid in system.info["pids"][victim]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_no_event_is_lost_or_told_twice_when_each_process_is_killed_in_mid_stream(stack: System) -> None:
    client, model = stack.client(), stack.model
    expected = client.responses.create(model=model, **ASKED).output_text
    for victim in VICTIMS:
        reader = Reader(stack)
        stream = client.responses.create(model=model, background=True, stream=True, **ASKED)
        reader.read(stream, lambda name=victim: _kill(stack, name), KILLED_AFTER)  # type: ignore[misc]
        events = reader.events
        assert [event["sequence_number"] for event in events] == list(range(len(events))), victim
        told = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert (told, events[-1]["type"]) == (expected, "response.incomplete"), victim
        # Only who loses its gateway has to ask again.
        assert (reader.num_streams > 1) == (victim == "gateway"), victim
        again = Reader(stack)
        again.read(client.responses.retrieve(reader.response_id, stream=True), lambda: None, 0)
        assert again.events == events, victim


def test_text_of_a_background_stream_comes_while_it_is_written(stack: System) -> None:
    times = []
    stream = stack.client().responses.create(model=stack.model, background=True, stream=True, **ASKED)
    for event in stream:
        if event.type == "response.output_text.delta" and (not times or time.monotonic() > times[-1] + 0.02):
            times.append(time.monotonic())
    # Written for five seconds: it does not come at the end, nor in the steps of jobs that nobody follows.
    assert times[-1] - times[0] > 3.0
    assert max(after - before for before, after in pairwise(times)) < 1.5
