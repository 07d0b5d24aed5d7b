"""One gateway's dispatcher over a real NATS server, with times short enough for tests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec

from gateway.dispatch.dispatcher import DispatchCounts, Dispatcher, Ending
from gateway.dispatch.inflight import Flight
from gateway.dispatch.timeouts import RecoveryLimits
from gateway.errors import ApiError
from gateway.fleet.liveness import FleetLimits
from gateway.metrics import GatewayMetrics
from shared.messages import Delta, Finish, Request
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.subjects import Queue
from tests.gateway.wire_worker import HEARTBEAT_S, QUEUES, WireWorker, until

FAST_FLEET = FleetLimits(
    heartbeat_s=HEARTBEAT_S,
    probe_after_s=0.15,
    probe_interval_s=0.1,
    answer_s=0.1,
    silence_s=0.4,
    stall_s=0.5,
    reconnect_grace_s=0.3,
    disturbance_s=1.0,
)
FAST_RECOVERY = RecoveryLimits(
    max_moves=4,
    stall_s=1.0,
    prefill_stall_s=1.0,
    ack_timeout_s=0.5,
    claim_timeout_s=0.4,
    delivered_claim_timeout_s=0.6,
    suspect_claim_timeout_s=0.6,
    reconnect_timeout_s=1.0,
)
# Nothing is late, however slow the machine is: what is moved is moved for what the test does.
PATIENT_FLEET = replace(FAST_FLEET, silence_s=60.0, stall_s=60.0)
PATIENT_RECOVERY = replace(
    FAST_RECOVERY,
    stall_s=60.0,
    prefill_stall_s=60.0,
    ack_timeout_s=60.0,
    claim_timeout_s=60.0,
    disturbed_claim_timeout_s=60.0,
    delivered_claim_timeout_s=60.0,
    suspect_claim_timeout_s=60.0,
    reconnect_timeout_s=60.0,
)


class ListSink:
    """Keeps everything, and can be waited for."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.error: ApiError | None = None
        self.ended = asyncio.Event()
        self.endings = 0

    def deliver(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish is not None:
            self._end()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.endings += 1
        self.ended.set()

    async def end(self, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            await self.ended.wait()

    async def has(self, num_tokens: int) -> None:
        await until(lambda: self.num_tokens >= num_tokens)

    @property
    def refusal(self) -> tuple[int, str | None] | None:
        """Status and code of the error."""
        return None if self.error is None else (self.error.status, self.error.code)

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


class NotingCounter(Counter[str]):
    """Notes what it counts in its order."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self._noted = noted

    def __setitem__(self, key: str, count: int) -> None:
        self._noted.append(key)
        super().__setitem__(key, count)


class NotingCounts(DispatchCounts):
    """Notes ends and moves in their order."""

    def __init__(self, endings: list[str], moves: list[str]) -> None:
        super().__init__(GatewayMetrics())
        self._endings = endings
        self.metrics.redispatches = NotingCounter(moves)

    def ended(self, flight: Flight, ending: Ending, finish: Finish | None) -> None:
        self._endings.append(ending)


class Bench:
    """One gateway's dispatcher, and a model name of this test's own."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.model = f"model-{uuid.uuid4().hex[:8]}"
        self.stack = stack
        self.limits = FAST_RECOVERY
        self.fleet_limits = FAST_FLEET
        self.endings: list[str] = []
        self.moves: list[str] = []
        self.dispatcher: Dispatcher

    async def start(self) -> None:
        self.nats = await connect(
            self.url, role="gateway", name="gateway", on_disconnect=self._disconnected, on_reconnect=self._reconnected
        )
        name, counts = f"gw{uuid.uuid4().hex[:8]}", NotingCounts(self.endings, self.moves)
        self.dispatcher = Dispatcher(self.nats, name, self.fleet_limits, self.limits, counts=counts)
        await self.dispatcher.start()
        self.stack.push_async_callback(self._close)

    async def _close(self) -> None:
        await self.dispatcher.close()
        await self.nats.close()

    async def _disconnected(self) -> None:
        self.dispatcher.disconnected()

    async def _reconnected(self) -> None:
        await self.dispatcher.reconnected()

    async def worker(self, name: str, queues: tuple[Queue, ...] = QUEUES) -> WireWorker:
        worker = WireWorker(self.url, self.model, f"{name}-{self.model}", queues)
        await self.stack.enter_async_context(worker)
        await until(lambda: not self.dispatcher.fleet.liveness.is_gone(worker.name))
        await until(lambda: self.dispatcher.fleet.is_ready(self.model))
        return worker

    async def begun(self, num_tokens: int = 0, **fields: object) -> tuple[WireWorker, ListSink, Request]:
        """Start a worker, submit a request, and let the worker claim it and say its first tokens."""
        worker, sink = await self.worker("a"), ListSink()
        await self.submit(sink, **fields)
        return worker, sink, await worker.begin(num_tokens)

    async def submit(self, sink: ListSink, **fields: object) -> Request:
        request = Request(
            id=uuid.uuid4().hex,
            model=self.model,
            text="x",
            reply=self.dispatcher.reply,
            deadline=time.time() + 30,
            sampling=Sampling(max_tokens=64),
        )
        for name, value in fields.items():
            request = _replace(request, name, value)
        flight = self.dispatcher.submit(request, sink, 3)
        self.flight = flight
        return request


def _replace(request: Request, name: str, value: object) -> Request:
    return msgspec.structs.replace(request, **{name: value})
