"""A supervised task that dies is logged by name and fails the process; one that is stopped or returns does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from shared.errors import DependencyError, HeadraceError
from shared.rust_panics import panics_as
from shared.task_supervisor import TaskSupervisor


@pytest.fixture
async def tasks() -> AsyncIterator[TaskSupervisor]:
    tasks = TaskSupervisor()
    yield tasks
    await tasks.close()


async def test_task_that_raises_fails_the_process_and_is_logged_by_name(
    tasks: TaskSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        raise ValueError("broken")

    tasks.start(work(), "heartbeats")
    await asyncio.wait_for(tasks.has_failed.wait(), 5)
    [record] = caplog.records
    assert record.levelname == "CRITICAL"
    assert "'heartbeats' failed" in record.getMessage()
    assert isinstance(record.exc_info[1], ValueError)


async def test_task_whose_awaited_future_is_cancelled_fails_the_process(
    tasks: TaskSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    answer = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await answer

    tasks.start(work(), "pull HR_INTERACTIVE")
    await asyncio.sleep(0)
    answer.cancel()
    await asyncio.wait_for(tasks.has_failed.wait(), 5)
    assert "'pull HR_INTERACTIVE' was cancelled" in caplog.records[0].getMessage()


async def test_stopped_task_has_ended_and_is_no_failure(tasks: TaskSupervisor) -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended = True

    task = tasks.start(work(), "outbox")
    await asyncio.sleep(0)
    await tasks.stop(task)
    assert ended
    assert not tasks.has_failed.is_set()


async def test_task_that_drops_a_cancellation_is_stopped_all_the_same(tasks: TaskSupervisor) -> None:
    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    task = tasks.start(work(), "search for batch queues")
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.stop(task), 5)
    assert task.cancelled()


async def test_task_that_returns_is_no_failure(tasks: TaskSupervisor) -> None:
    await tasks.start(asyncio.sleep(0), "streams")
    await asyncio.sleep(0)
    assert not tasks.has_failed.is_set()


async def test_periodic_action_is_tried_again_while_nats_is_away_and_dies_of_anything_else(
    tasks: TaskSupervisor,
) -> None:
    errors = [OSError("away"), DependencyError("no stream"), RuntimeError("a bug")]
    num_tries = 0

    async def act() -> None:
        nonlocal num_tries
        num_tries += 1
        raise errors.pop(0)

    tasks.every(0.001, act, "search")
    await asyncio.wait_for(tasks.has_failed.wait(), 5)
    assert num_tries == 3


async def test_close_stops_all(tasks: TaskSupervisor) -> None:
    running = [tasks.start(asyncio.sleep(60), str(number)) for number in range(3)]
    await tasks.close()
    assert all(task.cancelled() for task in running)
    assert not tasks.has_failed.is_set()


def test_panic_is_an_error_of_the_callers_choice() -> None:
    class PanicException(BaseException):
        """As PyO3 names and derives it."""

    with pytest.raises(HeadraceError, match="out of bounds"), panics_as(HeadraceError):
        raise PanicException("out of bounds")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_everything_else_is_left_alone(kind: type[BaseException]) -> None:
    with pytest.raises(kind), panics_as(HeadraceError):
        raise kind
