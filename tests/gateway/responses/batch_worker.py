"""A worker's side of the batch lane without an engine: takes jobs, records progress and stores results as told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.batch_progress import BatchProgress
from shared.batch_streams import batch_stream
from shared.consumers import consumer_config, consumer_name
from shared.kept_results import KeptResults
from shared.messages import BatchResult, Cancel, FinishReason, Request, decode_request
from shared.nats_connection import connect
from shared.result_shares import ResultShares
from shared.server_clock import ServerClock
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import cancel_subject, progress_subject

LIMITS = StreamLimits(tenant_max_bytes=1 << 24)


@dataclass
class BatchWorker:
    """Takes the jobs of one model and tenant when it is told to.

    Attributes:
        generated: The texts of jobs that it ends when it is asked to cancel them; it does not answer for others.
    """

    nats: Client
    model: str
    tenant: str
    cancels: list[Cancel] = field(default_factory=list)
    generated: dict[str, str] = field(default_factory=dict)
    _messages: dict[str, Msg] = field(default_factory=dict)

    async def take(self) -> Request:
        """Take the next job."""
        js = self.nats.jetstream()
        queue = await js.pull_subscribe_bind(consumer_name(self.model, "background"), stream=batch_stream(self.tenant))
        (message,) = await queue.fetch(1, timeout=10)
        request = decode_request(message.data)
        self._messages[request.id] = message
        return request

    async def progress(self, request: Request, text: str) -> None:
        """Record what a job has so far."""
        seq = self._messages[request.id].metadata.sequence.stream
        record = BatchProgress(b"", seq, "", 0, (), text)
        await self.nats.jetstream().publish(
            progress_subject(request.tenant, request.id), msgspec.msgpack.encode(record)
        )

    async def end(self, request: Request, text: str, finish: FinishReason = "stop", error: str | None = None) -> None:
        """Store the result of a job as a worker does: only if there is none."""
        result = BatchResult(
            id=request.id, model=request.model, tenant=request.tenant, text=text, finish=finish, error=error,
            prompt_tokens=3, completion_tokens=4, completed=1.0,
        )  # fmt: skip
        js = self.nats.jetstream()
        kept = KeptResults(js, ResultShares(js, can_purge=True, clock=ServerClock()))
        await kept.store(request.tenant, request.id, msgspec.json.encode(result), finish)
        await self._messages.pop(request.id).ack()

    async def _hear_cancel(self, message: Msg) -> None:
        cancel = msgspec.msgpack.decode(message.data, type=Cancel)
        self.cancels.append(cancel)
        for response_id in set(cancel.ids) & set(self.generated):
            request = Request(id=response_id, model=self.model, tenant=self.tenant, lane="batch")
            await self.end(request, self.generated.pop(response_id), "cancelled")


@asynccontextmanager
async def batch_worker(nats_url: str, model: str, tenant: str = "default") -> AsyncIterator[BatchWorker]:
    """Connect a worker of a model for a tenant's batch queue, which is made if it is missing."""
    nats = await connect(nats_url, role="worker", name=f"batch-{model}")
    try:
        js = nats.jetstream()
        await ensure_streams(js, LIMITS, [tenant])
        await js.add_consumer(batch_stream(tenant), consumer_config(model, "background", LIMITS, tenant))
        worker = BatchWorker(nats, model, tenant)
        await nats.subscribe(cancel_subject(model), cb=worker._hear_cancel)
        yield worker
    finally:
        await nats.close()
