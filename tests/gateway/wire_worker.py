"""A worker's side of the wire without an engine: pulls requests, sends frames and heartbeats as a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from shared.adapter_calls import AdapterBeats
from shared.consumers import consumer_config, consumer_name
from shared.features import IMAGES
from shared.messages import Cancel, Delta, Finish, Frame, Heartbeat, Request, Usage, decode_request, encode
from shared.nats_connection import close, connect
from shared.pooling import Task
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_streams
from shared.subjects import Queue, cancel_subject, probe_subject, worker_subject
from tests.waiting import until

HEARTBEAT_S = 0.05
QUEUES: tuple[Queue, ...] = ("resumed", "interactive")


def token_text(position: int) -> str:
    """The text of every sequence's token at this position: what an uninterrupted stream must add up to."""
    return f"{position} "


def expected_text(num_tokens: int) -> str:
    return "".join(map(token_text, range(num_tokens)))


class WireWorker:
    """One worker of one model. Use as `async with`. One of an earlier version pulls fewer queues."""

    def __init__(self, nats_url: str, model: str, name: str, queues: tuple[Queue, ...] = QUEUES) -> None:
        self.queues = queues
        self.model = model
        self.name = name
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.cancels: list[Cancel] = []
        self.step = 0
        self.running = 0
        self.is_beating = True
        self.is_pulling, self._is_dead = True, False
        self.draining = False
        self.max_prompt_characters = 0
        self.chat_format = ""
        self.sees = False
        self.tasks: tuple[Task, ...] = ("generate", "embed", "score")
        self.adapters: AdapterBeats = ()
        self.num_prepared = 0
        self._pulled: set[Queue] = set()
        self.num_reconnects = 0
        self._url = nats_url
        self._messages: dict[tuple[str, int], Msg] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self.nats: Client

    async def __aenter__(self) -> WireWorker:
        self.nats = await connect(self._url, role="worker", name=self.name, on_reconnect=self._prepare)
        try:
            await self._prepare()
            await self.nats.subscribe(cancel_subject(self.model), cb=self._hear_cancel)
            await self.nats.subscribe(probe_subject(self.name), cb=self._answer_probe)
        except BaseException:
            await close(self.nats)
            raise
        pulling = (asyncio.create_task(self._pull(queue)) for queue in self.queues)
        self._tasks = [asyncio.create_task(self._beat()), *pulling]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Stop everything at once, without goodbye."""
        tasks, self._tasks = self._tasks, []
        # A cancellation is lost where `wait_for` of Python 3.11 ends in the same moment.
        self._is_dead, self.is_pulling = True, False
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await close(self.nats)

    async def stop_pulling(self) -> None:
        """Pull nothing more, and wait until the pull in progress has ended."""
        self.is_pulling = False
        await until(lambda: not self._pulled)

    async def stop_beating(self) -> None:
        """Send no heartbeat any more, but answer probes."""
        beating = self._tasks.pop(0)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    async def next_request(self) -> Request:
        async with asyncio.timeout(10):
            return await self.requests.get()

    async def begin(self, num_tokens: int = 0) -> Request:
        """Claim the next request, and say its first tokens."""
        request = await self.next_request()
        await self.claim(request)
        await self.say(request, 0, num_tokens)
        return request

    async def send(self, reply: str, deltas: Iterable[Delta]) -> None:
        """Send one frame."""
        self.step += 1
        await self.nats.publish(reply, encode(Frame(self.name, self.step, list(deltas))))
        await self.nats.flush()

    async def claim(self, *requests: Request, prompt_tokens: int = 3) -> None:
        """Claim requests, in one frame per gateway."""
        claims: defaultdict[str, list[Delta]] = defaultdict(list)
        for request in requests:
            assert request.reply is not None
            claim = Delta(request.id, request.epoch, len(request.emitted), prompt_tokens=prompt_tokens)
            claims[request.reply].append(claim)
        for reply, deltas in claims.items():
            await self.send(reply, deltas)

    async def say(self, request: Request, start: int, stop: int) -> None:
        """Send the tokens of these positions, one frame each."""
        assert request.reply is not None
        for position in range(start, stop):
            await self.send(request.reply, [token(request, position)])

    async def pool(self, request: Request) -> None:
        """Answer with the length of the text, and with 1."""
        text = request.text or ""
        numbers = (float(len(text)), 1.0)[: request.pooling.dimensions if request.pooling else None]
        vector = struct.pack(f"<{len(numbers)}f", *numbers)
        await self.end(request, 0, Finish("stop", Usage(3, 0, 1), vector=vector))

    async def answer(self, request: Request, text: str, finish: Finish | None = None, **claim: Any) -> None:
        """Claim a request and answer it with a text, one character a token."""
        assert request.reply is not None
        first = Delta(request.id, request.epoch, 0, prompt_tokens=3, **claim)
        characters = [Delta(request.id, request.epoch, at, (at,), text[at]) for at in range(len(text))]
        await self.send(request.reply, [first])
        for delta in characters:
            await self.send(request.reply, [delta])
        await self.end(request, len(text), finish or Finish("stop", Usage(3, len(text))))

    async def end(self, request: Request, num_tokens: int, finish: Finish | None = None) -> None:
        assert request.reply is not None
        finish = finish or Finish("length", Usage(3, num_tokens, 1))
        await self.send(request.reply, [Delta(request.id, request.epoch, num_tokens, finish=finish)])
        await self.ack(request)

    async def complete(self, request: Request, start: int, stop: int) -> None:
        """Claim a request, say the tokens of these positions, and end it."""
        await self.claim(request)
        await self.say(request, start, stop)
        await self.end(request, stop)

    async def ack(self, request: Request) -> None:
        message = self._messages.pop((request.id, request.epoch), None)
        if message is not None:
            await message.ack()

    async def refuse(self, request: Request) -> None:
        """Give a request back to the queue."""
        await self._messages.pop((request.id, request.epoch)).nak(0.05)

    async def serve(self, step_s: float = 0.0) -> None:
        """Answer all requests for ever, one token per running sequence and step, in one frame per gateway."""
        running: dict[str, tuple[Request, int]] = {}
        while True:
            taken = [] if running else [await self.requests.get()]
            while not self.requests.empty():
                taken.append(self.requests.get_nowait())
            # All at once: a round trip for each takes seconds for hundreds, in which they are published again.
            await self.claim(*taken)
            for request in taken:
                if request.pooling is not None:
                    await self.pool(request)
                else:
                    running[request.id] = (request, len(request.emitted))
            self.forget_cancelled(running)
            self.running = len(running)
            await self.step_all(running)
            await asyncio.sleep(step_s)

    def forget_cancelled(self, running: dict[str, tuple[Request, int]]) -> None:
        for cancel in self.cancels:
            for request_id in cancel.ids if cancel.keep != self.name else ():
                if request_id in running and (cancel.epoch is None or running[request_id][0].epoch <= cancel.epoch):
                    del running[request_id]
        self.cancels.clear()

    async def step_all(self, running: dict[str, tuple[Request, int]]) -> None:
        frames: dict[str, list[Delta]] = {}
        for request, position in list(running.values()):
            assert request.reply is not None
            delta = token(request, position)
            limit = request.sampling.max_tokens or 16
            if position + 1 == limit:
                delta = msgspec.structs.replace(delta, finish=Finish("length", Usage(3, limit)))
                del running[request.id]
                await self.ack(request)
            else:
                running[request.id] = (request, position + 1)
            frames.setdefault(request.reply, []).append(delta)
        for reply, deltas in frames.items():
            self.step += 1
            await self.nats.publish(reply, encode(Frame(self.name, self.step, deltas)))

    async def _hear_cancel(self, message: Msg) -> None:
        self.cancels.append(msgspec.msgpack.decode(message.data, type=Cancel))

    async def _answer_probe(self, message: Msg) -> None:
        if self.is_beating:
            await self.nats.publish(message.reply, b"")

    async def _prepare(self) -> None:
        js = self.nats.jetstream()
        await ensure_streams(js, StreamLimits())
        for queue in self.queues:
            await js.add_consumer(INTERACTIVE_STREAM, consumer_config(self.model, queue, StreamLimits(), ""))
        self.num_prepared += 1

    async def _beat(self) -> None:
        while True:
            if self.is_beating and self.nats.is_connected:
                await self.nats.publish(worker_subject(self.model, self.name), encode(self._heartbeat()))
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            worker=self.name,
            model=self.model,
            step=self.step,
            running=self.running,
            waiting=0,
            waiting_tokens=0,
            free_blocks=1000,
            total_blocks=1000,
            block_size=16,
            max_model_len=8192,
            max_num_seqs=1024,
            prefill_rate=1e5,
            decode_rate=1e4,
            queue_pending=0,
            draining=self.draining,
            max_prompt_characters=self.max_prompt_characters,
            chat_format=self.chat_format,
            started=1.0,
            tasks=self.tasks,
            num_reconnects=self.num_reconnects,
            adapters=self.adapters,
            features=(*(["resumed"] if "resumed" in self.queues else []), *([IMAGES] if self.sees else [])),
        )

    async def _pull(self, queue: Queue) -> None:
        js = self.nats.jetstream()
        durable = consumer_name(self.model, queue)
        while not self._is_dead:
            if not self.is_pulling or not self.nats.is_connected:
                await asyncio.sleep(0.01)
                continue
            with contextlib.suppress(NatsError):
                subscription = await js.pull_subscribe_bind(durable, stream=INTERACTIVE_STREAM)
                while self.is_pulling:
                    self._pulled.add(queue)
                    with contextlib.suppress(TimeoutError):
                        for message in await subscription.fetch(64, timeout=0.5):
                            request = decode_request(message.data)
                            self._messages[(request.id, request.epoch)] = message
                            self.requests.put_nowait(request)
            self._pulled.discard(queue)


def token(request: Request, position: int) -> Delta:
    return Delta(request.id, request.epoch, position, (position,), token_text(position))
