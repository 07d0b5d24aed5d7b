from __future__ import annotations

import asyncio
from typing import Any

from nats.js.api import StreamConfig, StreamInfo, StreamState

from ops.bench.batch_lane import Backlog


class Queue:
    """Takes jobs, `delay_s` each. A cancellation is lost, as where it meets the answer in `asyncio.wait_for`."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.deleted: list[int] = []

    def jetstream(self) -> Queue:
        return self

    async def publish(self, *_: object) -> None:
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            return

    async def stream_info(self, _: str) -> StreamInfo:
        return StreamInfo(StreamConfig(), StreamState(messages=2, bytes=2, first_seq=7, last_seq=8, consumer_count=1))

    async def delete_msg(self, _: str, seq: int) -> None:
        self.deleted.append(seq)


async def test_backlog_ends_though_a_cancellation_would_be_lost() -> None:
    queue: Any = Queue()
    backlog = Backlog(queue, queue, "demo")
    async with asyncio.timeout(10):
        async with backlog.kept_up():
            queue.delay_s = 0.1
            backlog._num_done = 1
            await asyncio.sleep(0.06)
        assert queue.deleted == [7, 8]
