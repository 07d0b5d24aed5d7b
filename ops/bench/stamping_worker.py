"""A worker without an engine for measuring gateways: one token per sequence and step, its text the time it was made.

Run as `python -m ops.bench.stamping_worker NATS_URL MODEL STEP_MS`. It speaks the wire as a worker does (pull,
claim, one frame per gateway and step, heartbeats) and does nothing else, so that the gateway saturates before it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from functools import partial

import msgspec
import uvloop
from nats.aio.msg import Msg

from gpu_worker.consumer.pull_queue import PullQueue
from gpu_worker.consumer.queued_message import ACK, QueuedMessage, send_ack
from ops.load_generator.rounds import stamp
from shared.consumers import ensure_consumer
from shared.direct_client import DirectClient
from shared.messages import Cancel, Delta, Finish, Frame, Heartbeat, Usage, decode_request, encode
from shared.nats_connection import connect
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_streams
from shared.subjects import cancel_subject, worker_subject
from shared.task_supervisor import TaskSupervisor

NAME = "stamping"
HEARTBEAT_S = 0.25
CAPACITY = 4096


@dataclass(slots=True)
class _Running:
    id: str
    epoch: int
    reply: str
    limit: int
    position: int = 0


class StampingWorker:
    """Sequences in flight, and the loop that gives each a token per step."""

    def __init__(self, nats: DirectClient, model: str, step_s: float) -> None:
        """Serve `model` over `nats`."""
        self._nats = nats
        self._model = model
        self._step_s = step_s
        self._running: dict[str, _Running] = {}
        self._admitted: list[tuple[_Running, QueuedMessage]] = []
        self._has_admitted = asyncio.Event()
        self._step = 0

    async def serve(self) -> None:
        """Serve until killed."""
        await ensure_streams(self._nats.jetstream(), StreamLimits())
        await self._nats.subscribe(cancel_subject(self._model), cb=self._cancel)
        tasks = TaskSupervisor()
        find = partial(ensure_consumer, self._nats.jetstream(), self._model, "interactive", StreamLimits())
        pulling = PullQueue(self._nats, INTERACTIVE_STREAM, find, lambda: CAPACITY, self._admit, tasks)
        await pulling.start()
        await asyncio.gather(self._beat(), self._run(), self._begin_admitted())

    async def _cancel(self, message: Msg) -> None:
        for request_id in msgspec.msgpack.decode(message.data, type=Cancel).ids:
            self._running.pop(request_id, None)

    def _admit(self, message: QueuedMessage) -> None:
        request = decode_request(message.data)
        assert request.reply is not None
        running = _Running(request.id, request.epoch, request.reply, request.sampling.max_tokens or 16)
        self._admitted.append((running, message))
        self._has_admitted.set()

    async def _begin_admitted(self) -> None:
        """Send the first token of each request at once: so the engine adds nothing to the time to first token."""
        while True:
            await self._has_admitted.wait()
            self._has_admitted.clear()
            admitted, self._admitted = self._admitted, []
            frames: dict[str, list[Delta]] = {}
            for running, _ in admitted:
                first = Delta(running.id, running.epoch, 0, (0,), stamp(), prompt_tokens=1)
                frames.setdefault(running.reply, []).append(first)
                running.position = 1
                self._running[running.id] = running
            await self._send(frames)
            for _, message in admitted:
                send_ack(self._nats, message, ACK)

    async def _beat(self) -> None:
        while True:
            heartbeat = Heartbeat(
                worker=NAME,
                model=self._model,
                step=self._step,
                running=len(self._running),
                waiting=0,
                waiting_tokens=0,
                free_blocks=1 << 20,
                total_blocks=1 << 20,
                block_size=16,
                max_model_len=1 << 20,
                max_num_seqs=1 << 16,
                prefill_rate=1e9,
                decode_rate=1e9,
                queue_pending=0,
            )
            await self._nats.publish(worker_subject(self._model, NAME), encode(heartbeat))
            await asyncio.sleep(HEARTBEAT_S)

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            # After a pause it does not hurry to catch up with more than a few steps.
            due = max(due + self._step_s, time.monotonic() - 5 * self._step_s)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._step += 1
            await self._send(self._deltas())

    async def _send(self, frames: dict[str, list[Delta]]) -> None:
        for reply, deltas in frames.items():
            self._nats.send(reply, encode(Frame(NAME, self._step, deltas)))

    def _deltas(self) -> dict[str, list[Delta]]:
        text = stamp()
        frames: dict[str, list[Delta]] = {}
        for sequence in list(self._running.values()):
            position = sequence.position
            sequence.position = position + 1
            finish = None
            if sequence.position >= sequence.limit:
                finish = Finish("length", Usage(1, sequence.limit))
                del self._running[sequence.id]
            delta = Delta(sequence.id, sequence.epoch, position, (position,), text, finish)
            frames.setdefault(sequence.reply, []).append(delta)
        return frames


async def main(nats_url: str, model: str, step_ms: float) -> None:
    """Connect and serve."""
    await StampingWorker(await connect(nats_url, role="worker", name=NAME), model, step_ms / 1000).serve()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
