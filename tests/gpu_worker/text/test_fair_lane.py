"""A lane of threads: turns by owner, bounds, and abandoned work."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import AsyncIterator

import pytest

from gpu_worker.text.fair_lane import FairLane, LaneBusyError


class Gate:
    """Work that waits to be let through, and notes the order in which it was done."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.done: list[str] = []

    def wait(self) -> None:
        self.open.wait(10)

    def note(self, name: str) -> str:
        self.done.append(name)
        return name


@pytest.fixture
async def lane() -> AsyncIterator[FairLane]:
    lane = FairLane("test", 1, 1000)
    yield lane
    lane.close()


def waits(lane: FairLane, owner: str, size: int) -> asyncio.Task[None]:
    return asyncio.create_task(lane.run(owner, size, lambda: None))


async def begun(lane: FairLane, gate: Gate) -> asyncio.Task[None]:
    """Occupy the lane's one thread until the gate is opened."""
    task = asyncio.create_task(lane.run("first", 1, gate.wait))
    await asyncio.sleep(0)
    return task


async def test_owners_take_turns_however_much_each_brings(lane: FairLane) -> None:
    gate = Gate()
    await begun(lane, gate)
    names = [f"a{i}" for i in range(4)] + ["b0", "b1", "c0"]
    tasks = [asyncio.create_task(lane.run(name[0], 1, lambda name=name: gate.note(name))) for name in names]
    await asyncio.sleep(0)
    gate.open.set()
    assert await asyncio.gather(*tasks) == names
    assert gate.done == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


async def test_pieces_without_bytes_all_take_their_turn(lane: FairLane) -> None:
    gate = Gate()
    await begun(lane, gate)
    tasks = [waits(lane, owner, size) for owner, size in (("a", 0), ("a", 0), ("b", 5), ("b", 0), ("b", 0))]
    await asyncio.sleep(0)
    gate.open.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)


async def test_full_lane_says_when_to_come_back(lane: FairLane) -> None:
    gate = Gate()
    await begun(lane, gate)
    waiting = [waits(lane, owner, 450) for owner in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(LaneBusyError) as raised:
        await lane.run("c", 450, lambda: None)
    assert raised.value.retry_after_s >= 1
    gate.open.set()
    await asyncio.gather(*waiting)
    assert await lane.run("c", 450, lambda: 5) == 5


async def test_one_owner_fills_half_of_a_lane_at_most(lane: FairLane) -> None:
    gate = Gate()
    await begun(lane, gate)
    waiting = [waits(lane, "a", 300)]
    await asyncio.sleep(0)
    with pytest.raises(LaneBusyError):
        await lane.run("a", 300, lambda: None)
    waiting.append(waits(lane, "b", 300))
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*waiting)


async def test_slow_lane_lets_less_wait() -> None:
    lane, gate = FairLane("test", 1, 10**9, max_wait_s=1.0), Gate()
    for _ in range(40):
        await lane.run("a", 100, lambda: time.sleep(0.01))  # at most 112 kB a second
    await begun(lane, gate)
    waiting = waits(lane, "a", 60_000)
    await asyncio.sleep(0)
    with pytest.raises(LaneBusyError):
        await lane.run("a", 60_000, lambda: None)
    gate.open.set()
    await waiting
    lane.close()


async def test_small_pieces_do_not_make_a_lane_look_slow() -> None:
    lane, gate = FairLane("test", 1, 10**9, max_wait_s=1.0), Gate()
    for _ in range(200):
        await lane.run("a", 1, lambda: None)
    await begun(lane, gate)
    waiting = [waits(lane, "a", 20_000) for _ in range(2)]
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*waiting)
    lane.close()


async def test_text_larger_than_the_bound_is_served_by_an_idle_lane(lane: FairLane) -> None:
    assert await lane.run("a", 10**9, lambda: 1) == 1


async def test_work_that_nobody_wants_any_more_is_not_done(lane: FairLane) -> None:
    gate = Gate()
    await begun(lane, gate)
    unwanted = asyncio.create_task(lane.run("a", 1, lambda: gate.note("unwanted"), lambda: False))
    left = asyncio.create_task(lane.run("a", 1, lambda: gate.note("left")))
    wanted = asyncio.create_task(lane.run("a", 1, lambda: gate.note("wanted")))
    await asyncio.sleep(0)
    left.cancel()
    gate.open.set()
    assert await wanted == "wanted"
    for task in (unwanted, left):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert gate.done == ["wanted"]


async def test_failure_reaches_its_owner_and_the_lane_goes_on(lane: FairLane) -> None:
    def fail() -> None:
        raise ValueError("broken text")

    with pytest.raises(ValueError, match="broken text"):
        await lane.run("a", 1, fail)
    assert await lane.run("a", 1, lambda: 7) == 7


async def test_close_drops_what_has_not_begun() -> None:
    lane, gate = FairLane("test", 1), Gate()
    first = await begun(lane, gate)
    second = asyncio.create_task(lane.run("a", 1, lambda: gate.note("second")))
    await asyncio.sleep(0)
    lane.close()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await second
    await first
    assert gate.done == []


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
async def test_yielding_lane_runs_at_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    changed, set_priority = [], os.setpriority

    def note(which: int, who: int, priority: int) -> None:
        changed.append((who, priority))
        set_priority(which, who, priority)

    monkeypatch.setattr(os, "setpriority", note)
    lane = FairLane("test", 1, yields=True)
    thread = await lane.run("a", 1, threading.get_native_id)
    assert await lane.run("a", 1, lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == 10
    # Its own thread alone, whatever priority the process has.
    assert changed == [(thread, 10)]
    assert thread != threading.get_native_id()
    lane.close()


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
async def test_lane_has_the_stack_that_deep_work_needs_and_other_threads_do_not() -> None:
    def stack_bytes() -> int:
        libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(256), ctypes.c_size_t()
        libc.pthread_getattr_np(ctypes.c_ulong(threading.get_ident()), attributes)
        libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
        return size.value

    before = await asyncio.to_thread(stack_bytes)
    lane = FairLane("test", 1, stack_bytes=before + (1 << 20))
    assert await lane.run("a", 1, stack_bytes) >= before + (1 << 20)
    threads = [asyncio.to_thread(stack_bytes) for _ in range(2)]
    assert await asyncio.gather(*threads) == [before] * 2
    lane.close()
