from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gpu_worker.start.assembly import Identity
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.nats_check import check_nats
from shared.errors import ConfigError
from shared.messages import Heartbeat
from shared.nats_connection import connect
from shared.streams import StreamLimits, ensure_interactive_stream
from shared.subjects import worker_subject


@contextlib.asynccontextmanager
async def beating(nats_url: str, model: str, revision: str, *, draining: bool = False) -> AsyncIterator[None]:
    """A worker that sends heartbeats."""
    client = await connect(nats_url, role="worker", name="other")
    heartbeat = Heartbeat(
        worker="other", model=model, step=0, running=0, waiting=0, waiting_tokens=0, free_blocks=1, total_blocks=1,
        block_size=16, max_model_len=64, max_num_seqs=1, prefill_rate=0, decode_rate=0, queue_pending=0,
        revision=revision, draining=draining,
    )  # fmt: skip

    async def beat() -> None:
        while True:
            await client.publish(worker_subject(model, "other"), msgspec.msgpack.encode(heartbeat))
            await asyncio.sleep(0.05)

    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()
        await client.close()


async def join(nats_url: str, model: str, revision: str, **settings: bool) -> None:
    config = WorkerConfig(model=Path("m"), nats_url=nats_url, **settings)
    await asyncio.to_thread(check_nats, config, Identity("new", model, revision))


async def test_another_revision_under_the_same_name_is_refused_unless_allowed(nats_url: str) -> None:
    async with beating(nats_url, "check-a", "rev1"):
        await join(nats_url, "check-a", "rev1")
        await join(nats_url, "check-b", "rev2")
        with pytest.raises(ConfigError, match=r"worker other serves another revision of 'check-a' \(rev1; this one is"):
            await join(nats_url, "check-a", "rev2")
        await join(nats_url, "check-a", "rev2", allow_revision_change=True)


async def test_clock_that_is_wrong_is_told_before_the_model_is_loaded(
    nats_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(nats_url, role="worker", name="other")
    await ensure_interactive_stream(client.jetstream(), StreamLimits())
    await client.close()
    await join(nats_url, "clocks", "r")
    assert "clock" not in caplog.text
    wrong = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: wrong)
    await join(nats_url, "clocks", "r")
    assert re.search(r"this machine's clock is 3(599|600)\.\d+ s ahead of NATS: set both", caplog.text)


async def test_worker_that_drains_does_not_keep_its_successor_out(nats_url: str) -> None:
    async with beating(nats_url, "check-c", "rev1", draining=True):
        await join(nats_url, "check-c", "rev2")


async def test_worker_whose_name_is_taken_is_refused_until_the_other_has_ended(nats_url: str) -> None:
    async def join_as_other() -> None:
        config = WorkerConfig(model=Path("m"), nats_url=nats_url)
        await asyncio.to_thread(check_nats, config, Identity("other", "check-d", "rev1"))

    async with beating(nats_url, "check-d", "rev1"):
        with pytest.raises(ConfigError, match=r"HEADRACE_WORKER_ID.*a worker named 'other' serves 'check-d' already"):
            await join_as_other()
    # As after a SIGKILL: nothing is heard of it any more.
    await join_as_other()
