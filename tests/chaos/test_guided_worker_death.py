"""200 streams of documents and tool calls that keep to a schema, while workers are killed in the middle of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.integration.system import System, running_system

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STREAMS = 200
NUM_AT_ONCE = 20
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "minimum": 0}},
        "required": ["word", "count"],
        "additionalProperties": False,
    },
    "minItems": 2,
    "maxItems": 3,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA, "strict": True}}
ARGUMENTS = {"type": "object", "properties": {"words": SCHEMA}, "required": ["words"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "count", "parameters": ARGUMENTS, "strict": True}}
# Every second stream calls a tool.
ASKED: list[dict[str, Any]] = [
    {"response_format": FORMAT},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
]


@pytest.fixture
def two_workers(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--workers", "2") as running:
        yield running


class Streams:
    """Runs the streams, some at once, and keeps their texts."""

    def __init__(self, client: openai.AsyncOpenAI, model: str) -> None:
        self.texts: dict[int, str] = {}
        self.finishes: dict[int, str | None] = {}
        self._ended = asyncio.Condition()
        self._client = client
        self._model = model
        self._places = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(self) -> None:
        await asyncio.gather(*(self._stream(index) for index in range(NUM_STREAMS)))

    async def until_ended(self, number: int) -> None:
        async with self._ended:
            await self._ended.wait_for(lambda: len(self.texts) >= number)

    async def _stream(self, index: int) -> None:
        async with self._places:
            chunks = await self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": f"Count the words of text {index}."}],
                temperature=index // 2 % 2,
                seed=index,
                max_tokens=600,
                stream=True,
                extra_headers={"Cache-Control": "no-cache"},
                **ASKED[index % 2],
            )
            text = ""
            async for chunk in chunks:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    for call in choice.delta.tool_calls or ():
                        text += (call.function and call.function.arguments) or ""
                    self.finishes[index] = choice.finish_reason
            async with self._ended:
                self.texts[index] = text
                self._ended.notify_all()


async def kill_workers_in_turn(system: System, streams: Streams) -> int:
    """Kill a worker each time that some more streams have begun, until all have ended; return how many were killed."""
    num_killed = 0
    while len(streams.texts) < NUM_STREAMS:
        ended = len(streams.texts)
        await streams.until_ended(min(ended + 20, NUM_STREAMS))
        if len(streams.texts) < NUM_STREAMS - 10:
            workers = system.info["pids"]["worker"]
            os.kill(workers[num_killed % len(workers)], signal.SIGKILL)
            num_killed += 1
            # Until it is back.
            await asyncio.sleep(4)
    return num_killed


async def test_guided_streams_of_killed_workers_are_byte_for_byte_the_undisturbed_ones(two_workers: System) -> None:
    async with two_workers.async_client(timeout=120.0) as client:
        undisturbed, disturbed = Streams(client, two_workers.model), Streams(client, two_workers.model)
        await undisturbed.run()
        _, num_killed = await asyncio.gather(disturbed.run(), kill_workers_in_turn(two_workers, disturbed))
    assert num_killed >= 3
    assert two_workers.gauge("headrace_redispatches_total") >= num_killed
    assert disturbed.texts == undisturbed.texts
    whole = [index for index, finish in disturbed.finishes.items() if finish == ("stop", "tool_calls")[index % 2]]
    assert len(whole) >= NUM_STREAMS * 0.9
    for index in whole:
        jsonschema.validate(json.loads(disturbed.texts[index]), (SCHEMA, ARGUMENTS)[index % 2])
