"""What a gateway process tells its parent through the pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator

import pytest

from gateway.process import parent_link
from gateway.process.parent_link import ParentLink, ProcessState


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    yield read, write
    for end in (read, write):
        with contextlib.suppress(OSError):
            os.close(end)


def test_state_is_told_at_once_and_with_each_beat(pipe: tuple[int, int]) -> None:
    link = ParentLink(0, 0, pipe[1])
    link.beat()
    link.enter(ProcessState.SERVING)
    link.beat()
    link.enter(ProcessState.DRAINING)
    assert os.read(pipe[0], 99) == b"srrd"
    assert link.state is ProcessState.DRAINING


def test_parent_that_does_not_read_or_is_dead_does_not_end_the_process(pipe: tuple[int, int]) -> None:
    link = ParentLink(0, 0, pipe[1])
    with contextlib.suppress(BlockingIOError):
        while os.write(pipe[1], bytes(4096)):
            pass
    link.enter(ProcessState.SERVING)
    os.close(pipe[0])
    link.enter(ProcessState.DRAINING)
    assert link.state is ProcessState.DRAINING


async def test_process_beats_as_long_as_its_loop_runs(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent_link, "BEAT_INTERVAL_S", 0.001)
    beating = asyncio.create_task(ParentLink(0, 0, pipe[1]).beat_forever())
    beats = b""
    while len(beats) < 3:
        await asyncio.sleep(0.002)
        with contextlib.suppress(BlockingIOError):
            beats += os.read(pipe[0], 99)
    assert set(beats) == set(b"s")
    assert not beating.done()
    beating.cancel()
