from __future__ import annotations

import asyncio
import time

from gateway.http1.flush import Flusher
from tests.gateway.wire_worker import until


class Stream:
    def __init__(self, *, is_broken: bool = False) -> None:
        self.num_flushes = 0
        self.is_broken = is_broken

    def flush(self) -> None:
        self.num_flushes += 1
        if self.is_broken:
            raise RuntimeError("this stream is broken")


async def test_next_flush_waits_as_long_as_the_last_one_took() -> None:
    flusher = Flusher(asyncio.get_running_loop())
    ended = []

    class SlowStream(Stream):
        def flush(self) -> None:
            time.sleep(0.03)
            ended.append(time.monotonic())

    flusher.add(SlowStream())
    await until(lambda: len(ended) == 1)
    flusher.add(SlowStream())
    await until(lambda: len(ended) == 2)
    # The second began when the first had been over for as long as it took, and took as long again.
    assert ended[1] - ended[0] >= 0.055


async def test_one_streams_exception_loses_no_neighbours_flush() -> None:
    flusher = Flusher(asyncio.get_running_loop())
    streams = [Stream(), Stream(is_broken=True), Stream()]

    async def flush_all(num_flushes: int) -> None:
        for stream in streams:
            flusher.add(stream)
        await until(lambda: [stream.num_flushes for stream in streams] == [num_flushes] * 3)

    await flush_all(1)
    await flush_all(2)


async def test_flush_in_which_the_process_was_paused_does_not_put_off_the_next_one() -> None:
    flusher = Flusher(asyncio.get_running_loop())

    class PausedStream(Stream):
        def flush(self) -> None:
            super().flush()
            time.sleep(2.0)  # the process stands still

    paused, stream = PausedStream(), Stream()
    flusher.add(paused)
    await until(lambda: paused.num_flushes == 1)
    flusher.add(stream)
    began = time.monotonic()
    await until(lambda: stream.num_flushes == 1)
    assert time.monotonic() - began < 1.0
