"""Batches through OpenAI's own client, against a gateway process, with a worker of the batch lane that echoes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.gateway.batches.conftest import EchoWorker, Place

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(number: int, model: str, text: str | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text or f"text {number}"}], "max_tokens": 8}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body} | fields


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def submitted(client: openai.AsyncOpenAI, data: bytes, **fields: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        **{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields  # type: ignore[arg-type]
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch, timeout_s: float = 30.0) -> Batch:
    async with asyncio.timeout(timeout_s):
        while batch.status not in ENDED:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


async def test_batch_is_computed_and_each_line_answered_once(client: openai.AsyncOpenAI, worker: EchoWorker) -> None:
    data = jsonl([line(number, worker.model) for number in range(64)])
    batch = await submitted(client, data, metadata={"of": "me"})
    assert (batch.object, batch.status, batch.endpoint, batch.metadata) == ("batch", "validating", CHAT, {"of": "me"})
    batch = await ended(client, batch)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (64, 64, 0)
    assert batch.error_file_id is None
    output = await lines_of(client, batch.output_file_id)
    told = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in output}
    assert len(output) == 64
    assert told == {f"line-{number}": f"text {number}" for number in range(64)}
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (64 * 3, 64 * 4)
    assert len(worker.computed) == len(set(worker.computed)) == 64
