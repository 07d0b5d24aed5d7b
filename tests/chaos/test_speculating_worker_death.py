"""Kill workers that speculate amid a stream: others finish it, whatever guesses there, and the text stays the same."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from ops.stack.config import DEMO_MODEL
from tests.gateway.gateway_process import API_KEY, running_gateway
from tests.servers import NatsServer

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

MODEL = "demo"
NUM_CHOICES = 2
MAX_TOKENS = 400
START_TIMEOUT_S = 40.0


@dataclass
class Streamed:
    """What a client has received so far: texts and ends, by choice, and the usage of all.

    Attributes:
        has_begun: Set when all choices have some text.
    """

    texts: dict[int, str] = field(default_factory=lambda: dict.fromkeys(range(NUM_CHOICES), ""))
    finishes: dict[int, str] = field(default_factory=dict)
    usage: openai.types.CompletionUsage | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Workers:
    """One worker process at a time, all for the same gateway."""

    nats_url: str
    directory: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, kind: str) -> None:
        settings = {
            "model": DEMO_MODEL,
            "served_model_name": MODEL,
            "nats_url": self.nats_url,
            "device": "cpu",
            "dtype": "float32",
            "num_threads": 1,
            "num_blocks": 300,
            "speculative": kind,
        }
        if kind in ("draft", "eagle"):
            settings["draft_model"] = DEMO_MODEL.parent / kind
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environ |= {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()}
        with (self.directory / "worker.log").open("ab") as log:
            command = [sys.executable, "-m", "gpu_worker"]
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def running_workers(nats_url: str, directory: Path) -> Iterator[Workers]:
    workers = Workers(nats_url, directory)
    try:
        yield workers
    finally:
        workers.kill()


async def stream(client: openai.AsyncOpenAI, streamed: Streamed) -> None:
    chunks = await client.completions.create(
        model=MODEL,
        prompt="import os\n\n\ndef list_files(path):\n",
        n=NUM_CHOICES,
        max_tokens=MAX_TOKENS,
        temperature=0.8,
        top_p=0.95,
        frequency_penalty=0.2,
        seed=11,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        extra_headers={"Cache-Control": "no-cache"},
    )
    async for chunk in chunks:
        streamed.usage = chunk.usage or streamed.usage
        for choice in chunk.choices:
            streamed.texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                streamed.finishes[choice.index] = choice.finish_reason
        if all(len(text) > 20 for text in streamed.texts.values()):
            streamed.has_begun.set()


async def wait_for_model(client: openai.AsyncOpenAI, workers: Workers) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (await client.models.list()).data:
        assert workers.process is not None
        assert workers.process.poll() is None, (workers.directory / "worker.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def undisturbed(client: openai.AsyncOpenAI) -> Streamed:
    streamed = Streamed()
    await stream(client, streamed)
    return streamed


async def handed_over(client: openai.AsyncOpenAI, workers: Workers, next_kind: str) -> Streamed:
    streamed = Streamed()
    whole = asyncio.create_task(stream(client, streamed))
    await streamed.has_begun.wait()
    workers.kill()
    workers.start(next_kind)
    # What the dead worker has sent arrives long before the next one is there.
    await asyncio.sleep(0.5)
    assert not streamed.finishes, "the worker was killed too late"
    await whole
    return streamed


async def test_text_stays_the_same_when_workers_with_and_without_speculation_take_over(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    nats = start_nats()
    with (
        running_gateway(tmp_path / "gateway", nats.url, is_patient=False) as gateway,
        running_workers(nats.url, tmp_path) as workers,
    ):
        workers.start("eagle")
        url = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=API_KEY, max_retries=0, timeout=60.0) as client:
            await wait_for_model(client, workers)
            expected = await undisturbed(client)
            to_plain = await handed_over(client, workers, "off")
            plain = await undisturbed(client)
            to_draft = await handed_over(client, workers, "draft")
    assert expected.usage is not None
    details = expected.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 0
    for answer in (expected, to_plain, plain, to_draft):
        assert answer.texts == expected.texts
        assert answer.finishes == dict.fromkeys(range(NUM_CHOICES), "length")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
        assert answer.usage.completion_tokens == NUM_CHOICES * MAX_TOKENS
