"""A gateway's side of the wire for worker tests, and workers with a simulated engine inside the test's own loop."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

import ops
from gpu_worker.consumer.golden.watch import GoldenSettings
from gpu_worker.consumer.request_reader import RequestBudgets
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.start.assembly import Identity, ServedModel, Worker
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.engine_setup import build_engine
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.model_tasks import read_model_tasks
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.disaggregation import as_role
from shared.messages import BatchResult, Cancel, Delta, Frame, Heartbeat, Request, encode
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.streams import RESULTS_STREAM, StreamLimits, ensure_streams
from shared.subjects import Queue, cancel_subject, frame_subject, request_subject, result_subject, worker_subject

DEMO_MODEL = Path(ops.__file__).parent / "demo_model" / "model"
TOKENIZER = ModelTokenizer(read_model_directory(DEMO_MODEL))
TASKS = read_model_tasks(read_model_directory(DEMO_MODEL), TOKENIZER)
SIZES = SchedulerConfig(block_size=16, num_blocks=400, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=2048)
BUDGETS = RequestBudgets(SIZES, None)

# Those who have a batch queue.
TENANTS = ("default", "acme", "mallory", "t")

_names = itertools.count(1)


def fresh_name(prefix: str) -> str:
    """Return a name that no other test uses: tests share a NATS server."""
    return f"{prefix}-{time.time_ns()}-{next(_names)}"


async def wait_until(check: Callable[[], bool | Awaitable[bool]], timeout_s: float = 9.0) -> None:
    """Wait for a condition that nothing announces; the queue delivers again what is unanswered after ten seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = check()
        if result if isinstance(result, bool) else await result:
            return
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


@dataclass
class Answer:
    """Everything received for one request."""

    deltas: list[Delta] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def finish(self) -> Any:
        return self.deltas[-1].finish

    async def wait(self, timeout_s: float = 10.0) -> Answer:
        await asyncio.wait_for(self.finished.wait(), timeout_s)
        return self

    async def wait_for_tokens(self, count: int, timeout_s: float = 10.0) -> None:
        await wait_until(lambda: len(self.token_ids) >= count, timeout_s)


class TestGateway:
    """Publishes requests and keeps what comes back."""

    __test__ = False

    def __init__(self, nats: Client, model: str) -> None:
        self.nats = nats
        self.js = nats.jetstream()
        self.model = model
        self.name = fresh_name("gw")
        self.reply = frame_subject(self.name)
        self.frames: list[Frame] = []
        self.answers: dict[tuple[str, int], Answer] = {}

    async def start(self, limits: StreamLimits | None = None) -> None:
        await ensure_streams(self.js, limits or StreamLimits(), TENANTS)
        await self.nats.subscribe(self.reply, cb=self.receive)

    def answer(self, request_id: str, epoch: int = 0) -> Answer:
        return self.answers.setdefault((request_id, epoch), Answer())

    def request(self, text: str | None = "x = ", **fields: Any) -> Request:
        sampling = fields.pop("sampling", Sampling(max_tokens=8, ignore_eos=True))
        fields.setdefault("id", fresh_name("r"))
        fields.setdefault("reply", self.reply)
        fields.setdefault("model", self.model)
        return Request(text=text, sampling=sampling, **fields)

    async def publish(self, request: Request) -> Answer:
        await self.publish_raw(encode(request))
        return self.answer(request.id, request.epoch)

    async def publish_job(self, job: Request, queue: Queue = "batch", tenant: str | None = None) -> Request:
        """Publish to a queue of the job's tenant, or of another one."""
        await self.publish_raw(encode(job), queue, tenant or job.tenant)
        return job

    async def results(self, request_id: str, tenant: str = "acme") -> list[BatchResult]:
        """Return all results stored for a job, of which there should be one at most."""
        subject = result_subject(tenant, request_id)
        try:
            message = await self.js.get_last_msg(RESULTS_STREAM, subject)
        except NotFoundError:
            return []
        info = await self.js.stream_info(RESULTS_STREAM, subjects_filter=subject)
        result = msgspec.json.decode(message.data or b"", type=BatchResult)
        return [result] * (info.state.subjects or {})[subject]

    async def result(self, request_id: str, tenant: str = "acme", timeout_s: float = 10.0) -> BatchResult:
        """Wait until a job has its one result."""

        async def is_there() -> bool:
            return bool(await self.results(request_id, tenant))

        await wait_until(is_there, timeout_s)
        (result,) = await self.results(request_id, tenant)
        return result

    async def publish_raw(self, payload: bytes, queue: Queue = "interactive", tenant: str = "t") -> int:
        ack = await self.js.publish(request_subject(self.model, queue, tenant), payload)
        return ack.seq

    async def ask(self, text: str | None = "x = ", **fields: Any) -> Answer:
        return await (await self.publish(self.request(text, **fields))).wait()

    async def cancel(
        self, *ids: str, epoch: int | None = None, keep: str | None = None, tenant: str | None = None
    ) -> None:
        await self.nats.publish(cancel_subject(self.model), encode(Cancel(ids, epoch, keep=keep, tenant=tenant)))

    async def wait_until_acknowledged(self, stream: str = "HR_INTERACTIVE") -> None:
        """Wait until the queue has no message of this model any more."""

        async def is_empty() -> bool:
            return await self.num_queued(stream) == 0

        await wait_until(is_empty)

    async def num_queued(self, stream: str = "HR_INTERACTIVE") -> int:
        """Messages of this model that are not acknowledged."""
        info = await self.js.stream_info(stream, subjects_filter=f"hr.req.{self.model.replace('_', '_5f')}.>")
        return sum((info.state.subjects or {}).values())

    async def receive(self, message: Msg) -> None:
        frame = msgspec.msgpack.decode(message.data, type=Frame)
        self.frames.append(frame)
        for delta in frame.deltas:
            answer = self.answer(delta.id, delta.epoch)
            answer.deltas.append(delta)
            answer.workers.append(frame.worker)
            answer.claimed.set()
            if delta.finish is not None:
                answer.finished.set()


@dataclass
class RunningWorker:
    """A worker in this process."""

    worker: Worker
    nats: Client
    name: str
    heartbeats: list[Heartbeat] = field(default_factory=list)

    async def drain(self, timeout_s: float = 5.0) -> None:
        await self.worker.consumer.drain(timeout_s)

    async def close(self) -> None:
        await self.worker.close()
        await self.nats.close()

    async def wait_for_heartbeat(self, accept: Callable[[Heartbeat], bool], timeout_s: float = 9.0) -> Heartbeat:
        """Wait for the first acceptable heartbeat from now on."""
        self.heartbeats.clear()
        await wait_until(lambda: any(map(accept, self.heartbeats)), timeout_s)
        return next(filter(accept, self.heartbeats))


MakeWorker = Callable[..., Awaitable[RunningWorker]]


async def start_worker(
    url: str,
    model: str,
    limits: StreamLimits | None = None,
    media: Any = None,
    tokenizer: ModelTokenizer = TOKENIZER,
    golden: GoldenSettings | None = None,
    **settings: Any,
) -> RunningWorker:
    """Start a worker with a simulated engine, one millisecond a step unless told otherwise.

    Args:
        url: Of NATS.
        model: Its name.
        limits: Of streams that it makes.
        media: Prepares images, for a model that sees.
        tokenizer: The demo model's, perhaps with another template.
        golden: What its answers are compared with.
        settings: Of the worker.
    """
    config = WorkerConfig(**{"model": DEMO_MODEL, "simulate": 1.0, "max_num_seqs": 64, "num_blocks": 4096, **settings})
    directory = read_model_directory(DEMO_MODEL)
    setup = build_engine(config, directory, tokenizer)
    if media is not None:
        setup = dataclasses.replace(setup, media=media)
    name = fresh_name("w")
    holder: list[RunningWorker] = []

    async def lost() -> None:
        holder[0].worker.consumer.disconnected()

    async def back() -> None:
        holder[0].worker.consumer.reconnected()

    nats = await connect(url, role="worker", name=name, on_disconnect=lost, on_reconnect=back)
    identity = Identity(name, model, "revision")
    served = ServedModel(directory, tokenizer, TASKS, golden)
    own: dict[str, Any] = {"prefix_wait_s": config.prefix_wait_s, "image_memory_bytes": config.image_memory_bytes}
    own["role"] = as_role(config.role)
    worker = Worker(identity, nats, setup, served, limits or StreamLimits(), **own)  # type: ignore[arg-type]
    running = RunningWorker(worker, nats, name)
    holder.append(running)

    async def hear(message: Msg) -> None:
        running.heartbeats.append(msgspec.msgpack.decode(message.data, type=Heartbeat))

    await nats.subscribe(worker_subject(model, name), cb=hear)
    await worker.start()
    return running
