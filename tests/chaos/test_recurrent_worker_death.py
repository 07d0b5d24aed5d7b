"""Kill workers of a model with recurrent layers, amid texts of which grammars force runs of tokens."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ops.stack.config import DEMO_MODEL
from tests.chaos.texts import FREE, stream_texts
from tests.integration.system import System, running_system
from tests.waiting import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TEXTS = 48
NUM_AT_ONCE = 12
MAX_TOKENS = 150
# Between digits that the model chooses there are more forced tokens than a recurrent layer keeps drafts.
FORCED: Any = {"guided_regex": "(the alphabetical order of number [0-9]{3} is unknown to everybody, ){3,9}end"}


@pytest.fixture
def two_workers(tmp_path: Path) -> Iterator[System]:
    """Serve random weights with the demo's tokenizer, speculating with n-grams."""
    # Here, because every run of tests imports this module, and hardly any this.
    from tests.gpu_worker.models.recurrent_models import save_case

    model = tmp_path / "recurrent"
    sizes = {"vocab_size": 4096, "max_position_embeddings": 2048}
    save_case("qwen3_5", model, **sizes, eos_token_id=0, bos_token_id=0, pad_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, model)
    settings = ["--speculative", "ngram", "--num-speculative-tokens", "3", "--num-threads", "1"]
    with running_system(tmp_path, "--workers", "2", "--model", str(model), *settings) as running:
        yield running


async def all_texts(client: openai.AsyncOpenAI, model: str, begun: asyncio.Semaphore) -> list[str]:
    """Stream texts of which half are guided, and half drawn."""

    def body(index: int) -> dict[str, Any]:
        output = FREE if index % 2 else FORCED
        return {"model": model, "temperature": index // 2 % 2, "max_tokens": MAX_TOKENS, "extra_body": output}

    return await stream_texts(client, NUM_TEXTS, begun, num_at_once=NUM_AT_ONCE, body=body)


def wait_for_both_workers(system: System) -> None:
    wait_for(lambda: system.metrics().count("\nvllm:num_requests_running{") >= 2, 60)


async def kill_now_and_then(system: System, begun: asyncio.Semaphore) -> None:
    """Kill a worker each time that some more texts have begun, but only while there are two."""
    for number in range(3):
        for _ in range(NUM_AT_ONCE):
            await begun.acquire()
        await asyncio.to_thread(wait_for_both_workers, system)
        os.kill(system.info["pids"]["worker"][number % 2], signal.SIGKILL)


async def test_texts_of_a_recurrent_model_stay_the_same_when_its_workers_are_killed(two_workers: System) -> None:
    async with two_workers.async_client(timeout=120.0) as client:
        undisturbed = await all_texts(client, two_workers.model, asyncio.Semaphore(0))
        begun = asyncio.Semaphore(0)
        disturbed, _ = await asyncio.gather(
            all_texts(client, two_workers.model, begun), kill_now_and_then(two_workers, begun)
        )
    assert disturbed == undisturbed
    assert two_workers.gauge("headrace_redispatches_total") >= 3
