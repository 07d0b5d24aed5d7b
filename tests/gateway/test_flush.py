from __future__ import annotations

import asyncio

from gateway.flush import Flusher


class Stream:
    def __init__(self, *, is_broken: bool = False) -> None:
        self.num_flushes = 0
        self.is_broken = is_broken

    def flush(self) -> None:
        self.num_flushes += 1
        if self.is_broken:
            raise RuntimeError("this stream is broken")


async def test_one_streams_exception_loses_no_neighbours_flush() -> None:
    flusher = Flusher(asyncio.get_running_loop())
    streams = [Stream(), Stream(is_broken=True), Stream()]
    for _ in range(2):
        for stream in streams:
            flusher.add(stream)
        await asyncio.sleep(0.02)
    assert [stream.num_flushes for stream in streams] == [2, 2, 2]
