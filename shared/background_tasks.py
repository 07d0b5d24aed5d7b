"""Tasks that nothing awaits: kept until they end, and logged when they fail.

The event loop keeps weak references only, so a task that nothing else refers to may be collected before it has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """The tasks of one owner."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Result], name: str | None = None) -> asyncio.Task[Result]:
        """Run `work` in a task of its own on the running event loop."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def wait(self) -> None:
        """Wait until the tasks that run now have ended, however they end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed", exc_info=error, extra={"task": task.get_name()})
