"""Background tasks are kept, waited for, and their failures are logged."""

from __future__ import annotations

import asyncio
import gc

import pytest

from shared.background_tasks import BackgroundTasks


async def test_task_that_nothing_refers_to_ends() -> None:
    tasks, ended = BackgroundTasks(), asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.01)
        ended.set()

    tasks.spawn(work())
    gc.collect()
    assert len(tasks) == 1
    await tasks.wait()
    assert ended.is_set()
    assert len(tasks) == 0


async def test_failure_is_logged_with_the_name_of_the_task(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()

    async def work() -> None:
        raise ValueError("broken")

    tasks.spawn(work(), "encode r-1")
    await tasks.wait()
    [record] = caplog.records
    assert isinstance(record.exc_info[1], ValueError)
    assert vars(record)["task"] == "encode r-1"


async def test_cancelled_task_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()
    tasks.spawn(asyncio.sleep(60)).cancel()
    await tasks.wait()
    assert caplog.records == []
    assert len(tasks) == 0
