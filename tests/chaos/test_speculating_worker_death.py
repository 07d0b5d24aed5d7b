"""Kill workers that speculate amid a stream: others finish it, whatever guesses there, and the text stays the same."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from ops.stack.config import DEMO_MODEL
from tests.gateway.gateway_process import API_KEY, running_gateway
from tests.servers import NatsServer

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "demo"
NUM_CHOICES = 2
MAX_TOKENS = 400
START_TIMEOUT_S = 120.0


@dataclass
class Answer:
    """Texts and ends by choice, and the usage of all."""

    texts: dict[int, str] = field(default_factory=lambda: dict.fromkeys(range(NUM_CHOICES), ""))
    finishes: dict[int, str] = field(default_factory=dict)
    usage: openai.types.CompletionUsage | None = None


@contextmanager
def worker(nats_url: str, directory: Path, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    settings = {"model": DEMO_MODEL, "served_model_name": MODEL, "nats_url": nats_url, "speculative": kind}
    settings |= {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_blocks": 300}
    if kind in ("draft", "eagle"):
        settings["draft_model"] = DEMO_MODEL.parent / kind
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environ |= {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()}
    with (directory / "worker.log").open("ab") as log:
        command = [sys.executable, "-m", "gpu_worker"]
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def ask(client: openai.AsyncOpenAI, begun: asyncio.Event | None = None) -> Answer:
    """Stream an answer; tell when all choices have some text."""
    answer = Answer()
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
        answer.usage = chunk.usage or answer.usage
        for choice in chunk.choices:
            answer.texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                answer.finishes[choice.index] = choice.finish_reason
        if begun is not None and all(len(text) > 20 for text in answer.texts.values()):
            begun.set()
    return answer


async def test_text_stays_the_same_when_workers_with_and_without_speculation_take_over(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    nats = start_nats()
    with running_gateway(tmp_path / "gateway", nats.url, is_patient=False) as gateway, ExitStack() as workers:

        def start(kind: str) -> subprocess.Popen[bytes]:
            return workers.enter_context(worker(nats.url, tmp_path, kind))

        async def handed_over(victim: subprocess.Popen[bytes], kind: str) -> tuple[Answer, subprocess.Popen[bytes]]:
            begun = asyncio.Event()
            whole = asyncio.create_task(ask(client, begun))
            await begun.wait()
            victim.kill()
            taking_over = start(kind)
            # What the dead worker has sent arrives long before the next one is there.
            await asyncio.sleep(0.5)
            assert not whole.done(), "the worker was killed too late"
            return await whole, taking_over

        eagle = start("eagle")
        url = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=API_KEY, max_retries=0, timeout=120.0) as client:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not (await client.models.list()).data:
                    assert eagle.poll() is None, (tmp_path / "worker.log").read_text()[-3000:]
                    await asyncio.sleep(0.05)
            expected = await ask(client)
            to_plain, off = await handed_over(eagle, "off")
            plain = await ask(client)
            to_draft, _ = await handed_over(off, "draft")
    details = expected.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 0
    for answer in (expected, to_plain, plain, to_draft):
        assert answer.texts == expected.texts
        assert answer.finishes == dict.fromkeys(range(NUM_CHOICES), "length")
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
        assert answer.usage.completion_tokens == NUM_CHOICES * MAX_TOKENS
