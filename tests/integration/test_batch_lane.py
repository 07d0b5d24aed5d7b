"""Batch jobs through any NATS client: every one is answered once, and none delays a person who is waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import nats
import pytest
from nats.aio.client import Client

from tests.integration.system import System, running_system

STEP_S = 0.02
# As many as there are slots, and short ones behind them.
JOB_TOKENS = [160] * 4 + [16] * 4


@pytest.fixture(scope="module")
def four_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    # So much slowdown holds nothing back for people: batch jobs take all slots at once.
    environ = {"HEADRACE_MAX_NUM_SEQS": "4", "HEADRACE_BATCH_SLOWDOWN": "1"}
    arguments = ("--simulate", str(STEP_S * 1000))
    with running_system(tmp_path_factory.mktemp("four-slots"), *arguments, environ=environ) as running:
        yield running


@pytest.fixture
async def queue(four_slots: System) -> AsyncIterator[Client]:
    client = await nats.connect(four_slots.info["nats_url"])
    yield client
    await client.close()


async def _publish_jobs(queue: Client, model: str) -> None:
    for index, max_tokens in enumerate(JOB_TOKENS):
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        job = {"id": f"job-{index}", "model": model, "lane": "batch", "text": f"job {index}", "sampling": sampling}
        await queue.jetstream().publish(f"hr.req.{model}.batch.default", json.dumps(job).encode())


async def test_interactive_request_does_not_wait_for_running_batch_jobs(four_slots: System, queue: Client) -> None:
    results = await queue.subscribe("hr.result.default.*")
    model = four_slots.model
    await _publish_jobs(queue, model)
    async with asyncio.timeout(10):
        while four_slots.gauge("headrace_fleet_running") < 4:  # noqa: ASYNC110 - until batch jobs have all slots
            await asyncio.sleep(STEP_S)
    async with four_slots.async_client() as client:
        stream = await client.completions.create(
            model=model, prompt="x", max_tokens=4, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        # It has waited for the end of no job: each holds its slot for three seconds.
        await queue.flush()
        assert results.pending_msgs == 0
        await stream.close()
    answers = [json.loads((await results.next_msg(timeout=30)).data) for _ in JOB_TOKENS]
    answers.sort(key=lambda answer: answer["id"])
    assert [answer["id"] for answer in answers] == [f"job-{index}" for index in range(len(JOB_TOKENS))]
    assert [answer["completion_tokens"] for answer in answers] == JOB_TOKENS
    assert {answer["finish"] for answer in answers} == {"length"}
    with pytest.raises(TimeoutError):
        await results.next_msg(timeout=0.5)
