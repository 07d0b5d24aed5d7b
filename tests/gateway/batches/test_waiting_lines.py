"""Lines whose model has no worker wait, and hold up neither the other lines nor the end of their batch."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.gateway.batches.conftest import EchoWorker
from tests.gateway.batches.test_batches import ended, jsonl, line, lines_of, submitted


@pytest.mark.parametrize("reason", ["cancelled", "expired"])
async def test_lines_with_tools_end_with_their_batch_while_no_worker_says_how_tools_are_called(
    client: openai.AsyncOpenAI, worker: EchoWorker, reason: str
) -> None:
    body = line(0, "away")["body"] | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    data = jsonl([line(each, "away", body=body) for each in range(3)])
    window = {"completion_window": "3s"} if reason == "expired" else {}
    batch = await submitted(client, data, **window)
    # Now they wait to be published.
    await asyncio.sleep(1.5)
    if reason == "cancelled":
        await client.batches.cancel(batch.id)
    batch = await ended(client, batch)
    assert batch.status == reason
    assert batch.output_file_id is None
    errors = await lines_of(client, batch.error_file_id)
    assert sorted(each["custom_id"] for each in errors) == ["line-0", "line-1", "line-2"]
    assert {each["error"]["code"] for each in errors} == {f"batch_{reason}"}
    assert worker.computed == []
