"""The tasks that a process cannot work without: when one of them dies, the process must end, and say which one it was.

Otherwise it would look healthy and do only part of its work: send heartbeats, say, and pull nothing. A task dies when
it raises, and when it is cancelled by anybody but its owner (the cancellation of something that it awaits is enough).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

from shared.errors import DependencyError
from shared.nats_connection import SEND_ERRORS

# A connection that is away, and a server that does not answer, come back.
_TRANSIENT_ERRORS: tuple[type[Exception], ...] = (DependencyError, *SEND_ERRORS)
# The NATS client drops a cancellation that reaches it while it flushes.
_CANCEL_AGAIN_S = 0.05

_log = logging.getLogger(__name__)


class TaskSupervisor:
    """Owns the tasks of a process; `has_failed` is set when one has died, or by who else finds that it must end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.has_failed = asyncio.Event()

    def start(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run `work` in a task on the running event loop, until it returns or is stopped."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def every(self, interval_s: float, action: Callable[[], Awaitable[object]], name: str) -> asyncio.Task[None]:
        """Run `action` at once and then periodically; where NATS is at fault, it is tried again in the next round."""
        return self.start(_repeat(interval_s, action, name), name)

    async def stop(self, *tasks: asyncio.Task[None]) -> None:
        """Cancel tasks, and wait until they have ended."""
        self._tasks.difference_update(tasks)
        waiting = set(tasks)
        while waiting:
            for task in waiting:
                task.cancel()
            _, waiting = await asyncio.wait(waiting, timeout=_CANCEL_AGAIN_S)

    async def close(self) -> None:
        """Stop all tasks."""
        await self.stop(*self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        is_stopped = task not in self._tasks
        self._tasks.discard(task)
        if is_stopped or not (task.cancelled() or error):
            return
        how = "was cancelled" if error is None else "failed"
        _log.critical("task %r %s: this process ends", task.get_name(), how, exc_info=error)
        self.has_failed.set()


async def _repeat(interval_s: float, action: Callable[[], Awaitable[object]], name: str) -> None:
    while True:
        try:
            await action()
        except _TRANSIENT_ERRORS as error:
            _log.warning("%s: %r; trying again in %.2g s", name, error, interval_s)
        await asyncio.sleep(interval_s)
