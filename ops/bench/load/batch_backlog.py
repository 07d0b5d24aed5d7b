"""A queue of batch jobs that never runs empty, published and counted as a tenant of the batch lane would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.batch_streams import batch_stream
from shared.subjects import request_subject, result_subject

TENANT = "default"
NUM_JOBS = 400
"""Jobs kept in the queue: more than any worker holds."""

_PROMPT = "Write a story about a dog and a cat who live near the river and like to play. " * 3
_JOB_TOKENS = 64
_QUIET_S = 0.7


class Backlog:
    """Publishes jobs and counts the tokens of their results.

    Attributes:
        num_tokens: Generated tokens of all results so far.
    """

    def __init__(self, batch: Client, admin: Client, model: str) -> None:
        """Publish over `batch`, purge the queue over `admin`."""
        self._batch = batch
        self._admin = admin
        self._model = model
        self._num_published = 0
        self._num_done = 0
        self._last_done = 0.0
        self._is_full = asyncio.Event()
        self.num_tokens = 0

    @classmethod
    async def connect(cls, batch_url: str, admin_url: str, model: str) -> Backlog:
        """Connect, and listen for results."""
        backlog = cls(await nats.connect(batch_url), await nats.connect(admin_url), model)
        subject = result_subject(TENANT, "x").removesuffix("x") + "*"
        await backlog._batch.subscribe(subject, cb=backlog._receive)
        return backlog

    async def close(self) -> None:
        """Disconnect."""
        await self._batch.close()
        await self._admin.close()

    @contextlib.asynccontextmanager
    async def kept_up(self) -> AsyncIterator[None]:
        """Keep the queue full until the block ends; then drop what waits, and wait for what runs."""
        self._num_published = self._num_done = 0
        self._is_full.clear()
        keeping = asyncio.create_task(self._keep())
        try:
            await self._is_full.wait()
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self._admin.jetstream().purge_stream(batch_stream(TENANT))
            self._last_done = time.monotonic()
            while (left := self._last_done + _QUIET_S - time.monotonic()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(left)

    async def rate(self, duration_s: float) -> float:
        """Return the tokens per second of the next seconds."""
        before, started = self.num_tokens, time.monotonic()
        await asyncio.sleep(duration_s)
        return (self.num_tokens - before) / (time.monotonic() - started)

    async def _keep(self) -> None:
        js, subject = self._batch.jetstream(), request_subject(self._model, "batch", TENANT)
        sampling = {"max_tokens": _JOB_TOKENS, "temperature": 0.0, "ignore_eos": True}
        while True:
            while self._num_published - self._num_done < NUM_JOBS:
                number = time.time_ns()
                job = {"id": f"job-{number}", "model": self._model, "lane": "batch", "sampling": sampling}
                await js.publish(subject, json.dumps(job | {"text": f"{number} {_PROMPT}"}).encode())
                self._num_published += 1
            self._is_full.set()
            await asyncio.sleep(0.02)

    async def _receive(self, message: Msg) -> None:
        self._num_done += 1
        self._last_done = time.monotonic()
        self.num_tokens += json.loads(message.data)["completion_tokens"]
