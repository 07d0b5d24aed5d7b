"""The link to a limited process: starts it, again if it dies, and gives it several pieces of work at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from shared.background_tasks import BackgroundTasks
from shared.errors import HeadraceError
from shared.limited_process import HEAD, READY, Outcome

START_TIMEOUT_S = 20.0
ANSWER_GRACE_S = 5.0
"""Beyond the limit of time that the process itself keeps."""

_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG")

_logger = logging.getLogger(__name__)


class LimitedProcessError(HeadraceError):
    """The process does not start, or does not answer."""


@dataclass(eq=False, slots=True)
class _Running:
    process: asyncio.subprocess.Process
    waiting: dict[int, asyncio.Future[Outcome]] = field(default_factory=dict)
    has_ended: bool = False


class LimitedLink:
    """Owns the process, which starts when it is first needed."""

    def __init__(
        self, module: str, time_limit_s: float, what: str, first_message: Callable[[], bytes] | None = None
    ) -> None:
        """Start nothing yet. Log lines call the process `what`; before it is ready it gets `first_message`, if any."""
        self._module, self._first_message, self._what = module, first_message, what
        self._time_limit_s = time_limit_s
        self._running: _Running | None = None
        self._is_closed = False
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(READY + 1)
        self._tasks = BackgroundTasks()

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return None if self._running is None else self._running.process.pid

    async def close(self) -> None:
        """End the process; what still waits fails."""
        self._is_closed = True
        if self._running is not None:
            await _end(self._running)
        await self._tasks.wait()

    async def start(self) -> None:
        """Return when the process is ready, at once if it runs; `LimitedProcessError` if it cannot be."""
        try:
            await self._started()
        except (OSError, EOFError, TimeoutError):
            _logger.warning("%s does not start", self._what, exc_info=True)
            raise LimitedProcessError(f"{self._what} does not start") from None

    async def ask(self, message: bytes, niceness: int) -> Outcome:
        """Return what becomes of a piece of work, as nice to other processes as `niceness`, from 0 to 19, says.

        If it is interrupted, or the process dies, it is asked once more.

        Raises:
            LimitedProcessError: It does not answer, the work is interrupted again, or the link is closed.
        """
        for _ in range(2):
            try:
                outcome = await self._exchange(message, niceness)
                if not outcome.is_interrupted:
                    return outcome
                _logger.warning("work in %s was interrupted by the system", self._what)
            except (OSError, EOFError, TimeoutError):
                _logger.warning("%s does not answer", self._what, exc_info=True)
        raise LimitedProcessError(f"{self._what} does not answer")

    async def _exchange(self, message: bytes, niceness: int) -> Outcome:
        running = await self._started()
        assert running.process.stdin is not None
        number = next(self._numbers)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        running.waiting[number] = answer
        try:
            async with asyncio.timeout(self._time_limit_s + ANSWER_GRACE_S):
                running.process.stdin.write(HEAD.pack(number, len(message), niceness) + message)
                await running.process.stdin.drain()
                return await answer
        except (OSError, TimeoutError):
            await _end(running)
            raise
        finally:
            del running.waiting[number]

    async def _started(self) -> _Running:
        async with self._starting:
            if self._is_closed:
                raise LimitedProcessError(f"{self._what} is closed")
            if self._running is None or self._running.has_ended:
                self._running = await self._start()
            return self._running

    async def _start(self) -> _Running:
        """Start a process; `close` ends it also before it is ready."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Libraries may write parts of untrusted input there.
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(),
        )
        running = self._running = _Running(process)
        if self._is_closed:
            await _end(running)
            raise LimitedProcessError(f"{self._what} is closed")
        ready: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        running.waiting[READY] = ready
        self._tasks.spawn(_read_answers(running))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if self._first_message is not None:
                    assert process.stdin is not None
                    message = self._first_message()
                    process.stdin.write(HEAD.pack(READY, len(message), 0) + message)
                    await process.stdin.drain()
                await ready
        except BaseException:
            await _end(running)
            self._running = None
            raise
        del running.waiting[READY]
        return running


async def _read_answers(running: _Running) -> None:
    """Hand out answers until the process ends or tells no more; then let everybody fail who still waits."""
    output = running.process.stdout
    assert output is not None
    try:
        while True:
            number, length, _ = HEAD.unpack(await output.readexactly(HEAD.size))
            outcome = msgspec.msgpack.decode(await output.readexactly(length), type=Outcome)
            answer = running.waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result(outcome)
    except (OSError, EOFError):
        running.has_ended = True
        for answer in running.waiting.values():
            if not answer.done():
                answer.set_exception(EOFError("the process has ended"))
        # It may live on, and only have closed its output.
        await _end(running)


async def _end(running: _Running) -> None:
    running.has_ended = True
    with contextlib.suppress(ProcessLookupError):
        running.process.kill()
    await running.process.wait()


def _environment() -> dict[str, str]:
    """Return the variables of the process: no secret of this one, and where its modules are."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
