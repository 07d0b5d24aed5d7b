from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import openai
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from gateway.admission.api_keys import create_key
from shared.batch_streams import batch_stream
from shared.consumers import consumer_config, consumer_name
from shared.kept_results import KeptResults
from shared.messages import BatchResult, Request, decode_request
from shared.nats_connection import SEND_ERRORS, connect
from shared.result_shares import ResultShares
from shared.server_clock import ServerClock
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import encode_name
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.servers import NatsServer

LIMITS = StreamLimits(tenant_max_bytes=1 << 26, ack_wait_s=2.0)


@dataclass
class EchoWorker:
    """Takes jobs of a model's batch queue and answers each with the last message or prompt of its request.

    Attributes:
        computed: Ids of the jobs in the order of their answers; a job that is answered twice stands here twice.
        answer: Makes the result of a request; None leaves it to a later delivery.
        pause_s: Time that an answer takes.
    """

    nats: Client
    model: str
    tenant: str = "default"
    computed: list[str] = field(default_factory=list)
    answer: Callable[[Request], BatchResult | None] = field(default=lambda request: echo(request))
    pause_s: float = 0.0

    async def work(self) -> None:
        js = self.nats.jetstream()
        kept = KeptResults(js, ResultShares(js, can_purge=True, clock=ServerClock()))
        queue = await js.pull_subscribe_bind(consumer_name(self.model, "batch"), stream=batch_stream(self.tenant))
        while True:
            messages = []
            with contextlib.suppress(Exception):
                messages = await queue.fetch(16, timeout=0.5)
            for message in messages:
                # A server that dies meanwhile costs the answer, never the worker: the job is delivered again.
                with contextlib.suppress(*SEND_ERRORS):
                    await self._answer(message, kept)

    async def _answer(self, message: Msg, kept: KeptResults) -> None:
        request = decode_request(message.data)
        if await kept.end_of(self.tenant, request.id) is not None:
            await message.ack()
            return
        result = self.answer(request)
        if result is None:
            return
        await asyncio.sleep(self.pause_s)
        self.computed.append(request.id)
        await kept.store(self.tenant, request.id, msgspec.json.encode(result), result.finish)
        await message.ack()


def echo(request: Request) -> BatchResult:
    text = request.messages[-1].content if request.messages else request.text
    return BatchResult(
        id=request.id, model=request.model, tenant=request.tenant, text=str(text), finish="stop", prompt_tokens=3,
        completion_tokens=4, completed=1.0, vector=b"\0\0\x80?" if request.pooling else None,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def echo_worker(nats_url: str, model: str = "m", tenant: str = "default") -> AsyncIterator[EchoWorker]:
    nats = await connect(nats_url, role="worker", name=f"echo-{model}")
    try:
        js = nats.jetstream()
        await ensure_streams(js, LIMITS, (tenant,))
        await js.add_consumer(batch_stream(tenant), consumer_config(model, "batch", LIMITS, tenant))
        worker = EchoWorker(nats, model, tenant)
        task = asyncio.create_task(worker.work())
        try:
            yield worker
        finally:
            while not task.done():  # NATS's client drops a cancellation that reaches it while it flushes
                task.cancel()
                await asyncio.wait([task], timeout=0.05)
            # A worker that has failed explains why its jobs were not answered.
            with contextlib.suppress(asyncio.CancelledError):
                task.result()
    finally:
        await nats.close()


@dataclass(frozen=True)
class Place:
    """Where the gateways of these tests meet: a NATS server and a directory of files.

    Attributes:
        keys: Keys by their tenants.
        unused: Tenants for tests that begin: what other tests left running writes files of its own tenants alone.
    """

    nats_url: str
    directory: Path
    keys: dict[str, str] = field(default_factory=dict)
    unused: Iterator[str] = field(default_factory=lambda: iter(()))

    @contextlib.contextmanager
    def gateway(self, name: str, **settings: object) -> Iterator[GatewayProcess]:
        settings = {"files": self.directory / "files", "keys_file": self.directory / "keys.json"} | settings
        with running_gateway(self.directory / name, self.nats_url, **settings) as gateway:
            yield gateway

    def client(self, gateway: GatewayProcess, tenant: str = "") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=self.keys.get(tenant, API_KEY), max_retries=0, timeout=60
        )

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    def files(self, tenant: str, pattern: str = "*.data") -> list[Path]:
        return sorted((self.directory / "files" / encode_name(tenant)).rglob(pattern))


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("batches")
    file = directory / "keys.json"
    keys = {
        "narrow": create_key(file, tenant="narrow", models=["other"])[1],
        "slow": create_key(file, tenant="slow", requests_per_minute=2)[1],
    }
    tenants = [f"tenant-{number}" for number in range(200)]
    keys |= {tenant: create_key(file, tenant=tenant, reads_per_minute=10**9, weight=0.5)[1] for tenant in tenants}
    with NatsServer(tmp_path_factory.mktemp("nats")).running() as server:
        yield Place(server.url, directory, keys, iter(tenants))


@pytest.fixture(scope="package")
def gateway(place: Place) -> Iterator[GatewayProcess]:
    with place.gateway("gateway") as gateway:
        yield gateway


@pytest.fixture
def tenant(place: Place) -> str:
    """A tenant of this test's own."""
    return next(place.unused)


@pytest.fixture
async def worker(place: Place, tenant: str) -> AsyncIterator[EchoWorker]:
    async with echo_worker(place.nats_url, tenant=tenant) as worker:
        yield worker


@pytest.fixture
async def client(place: Place, gateway: GatewayProcess, tenant: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with place.client(gateway, tenant) as client:
        yield client


@pytest.fixture
async def own(start_nats: Callable[..., NatsServer], tmp_path: Path) -> AsyncIterator[tuple[Place, EchoWorker]]:
    """A NATS server and files of the test's own, with a worker of the batch lane."""
    place = Place(start_nats().url, tmp_path, {})
    async with echo_worker(place.nats_url) as worker:
        yield place, worker
