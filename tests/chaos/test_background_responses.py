"""Background responses while processes are killed in turn: each ends as it would have, each event comes once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
import pytest
from openai.types.responses import Response

from tests.integration.system import System, running_system

NUM_RESPONSES = 6
NUM_TOKENS = 150
VICTIMS = ("worker", "gateway", "nats", "worker", "redis")
GIVE_UP_S = 90.0
STREAMED_TOKENS = 500
KILLED_AFTER = 6
ENDS = ("response.completed", "response.incomplete", "response.failed")

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(400)]

Result = TypeVar("Result")


def asked(num_tokens: int, text: str = "Tell me.") -> dict[str, Any]:
    """Return the fields of a response of a fixed length and text."""
    fixed = {"max_output_tokens": num_tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return {"input": text, **fixed}


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
    return client.responses.create(model=model, background=True, **asked(NUM_TOKENS, text)).id


def _begun(client: openai.OpenAI, response_id: str) -> Response | None:
    response = client.responses.retrieve(response_id)
    return None if response.status == "queued" else response


def _ended(client: openai.OpenAI, response_id: str) -> Response | None:
    response = client.responses.retrieve(response_id)
    return None if response.status in ("queued", "in_progress") else response


def test_no_background_response_is_lost_when_each_process_is_killed_in_turn(stack: System) -> None:
    client, model = stack.client(), stack.model
    expected = {
        text: client.responses.create(model=model, **asked(NUM_TOKENS, text)).output_text
        for text in map(str, range(NUM_RESPONSES))
    }
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
        """Read to the end; do something once a number of pieces of text have come."""
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
    expected = client.responses.create(model=model, **asked(STREAMED_TOKENS)).output_text
    for victim in ("gateway", "worker", "nats", "redis"):
        reader = Reader(stack)
        stream = client.responses.create(model=model, background=True, stream=True, **asked(STREAMED_TOKENS))
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
    stream = stack.client().responses.create(model=stack.model, background=True, stream=True, **asked(STREAMED_TOKENS))
    for event in stream:
        if event.type == "response.output_text.delta" and (not times or time.monotonic() > times[-1] + 0.02):
            times.append(time.monotonic())
    # Written for five seconds: it does not come at the end, nor in the steps of jobs that no client follows.
    assert times[-1] - times[0] > 3.0
    assert max(after - before for before, after in pairwise(times)) < 1.5
