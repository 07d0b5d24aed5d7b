"""Sends sessions at their times, and records what came of each request.

A request that is due is sent, whatever became of those before: a slow server does not slow down its measurement
(coordinated omission). Where `max_concurrency` holds it back, the wait is part of its latency. Without a rate there are
no due times; with `is_closed_loop` latencies count from the sending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ops.load_generator.answer import Reading, read
from ops.load_generator.connection import Address, Answer, Connection
from ops.load_generator.record import Record, record_of
from ops.load_generator.sessions import Session, Turn


@dataclass(frozen=True, slots=True)
class Wire:
    """How requests are written: for chat or completions, with fields of all of them."""

    address: Address
    is_chat: bool
    fields: Mapping[str, Any] = field(default_factory=dict)

    def request(self, history: Sequence[tuple[str, Turn | str]], max_tokens: int) -> bytes:
        """Return the request that continues turns and answers, by their role, with the last turn."""
        body: dict[str, Any] = {"model": self.address.model, "max_tokens": max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.is_chat:
            body["messages"] = [{"role": role, "content": _content(said)} for role, said in history]
        else:
            body["prompt"] = " ".join(said if isinstance(said, str) else said.text for _, said in history)
        return self.address.post(
            "/v1/chat/completions" if self.is_chat else "/v1/completions", body | dict(self.fields)
        )


class Driver:
    """Owns the connections.

    Attributes:
        records: Of all requests that have ended.
        num_running: Requests that were sent and have not ended.
        started: On the clock of `time.monotonic`.
    """

    def __init__(
        self, wire: Wire, *, max_concurrency: int | None = None, timeout_s: float, is_closed_loop: bool = False
    ) -> None:
        self.records: list[Record] = []
        self.num_running = 0
        self.started = time.monotonic()
        self._wire = wire
        self._timeout_s = timeout_s
        self._is_closed_loop = is_closed_loop
        self._idle: list[Connection] = []
        self._places: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
        if max_concurrency is not None:
            places = asyncio.Semaphore(max_concurrency)
            self._places = lambda: places

    async def run(self, sessions: Sequence[Session], stopped: asyncio.Event) -> None:
        """Hold all sessions, or stop where that is wanted; then those under way are broken off."""
        self.started = time.monotonic()
        tasks: set[asyncio.Task[None]] = set()
        sending = asyncio.create_task(self._send_all(sessions, tasks))
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, stopping, *tasks):
            task.cancel()
        await asyncio.gather(sending, stopping, *tasks, return_exceptions=True)
        await self.close()
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error

    async def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)

    async def ask(self, turn: Turn) -> Reading:
        """Ask one thing apart from the run."""
        return read(await self._exchange(self._wire.request([("user", turn)], turn.max_tokens)))

    async def _send_all(self, sessions: Sequence[Session], tasks: set[asyncio.Task[None]]) -> None:
        async with asyncio.TaskGroup() as group:
            for session in sorted(sessions, key=lambda session: session.at):
                await asyncio.sleep(max(0.0, self.started + session.at - time.monotonic()))
                task = group.create_task(self._hold(session))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _hold(self, session: Session) -> None:
        history: list[tuple[str, Turn | str]] = []
        due_s = session.at
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(max(0.0, self.started + due_s - time.monotonic()))
            history.append(("user", turn))
            async with self._places():
                if self._is_closed_loop:
                    due_s = time.monotonic() - self.started
                answer = await self._counted(self._wire.request(history, turn.max_tokens))
            reading = read(answer)
            self.records.append(record_of(reading, self.started, due_s, number))
            if reading.problem is not None:
                return
            history.append(("assistant", reading.text))
            if number + 1 < len(session.turns):
                due_s = time.monotonic() - self.started + session.turns[number + 1].pause_s

    async def _counted(self, request: bytes) -> Answer:
        self.num_running += 1
        try:
            return await self._exchange(request)
        finally:
            self.num_running -= 1

    async def _exchange(self, request: bytes) -> Answer:
        """Send a request, on a kept connection if there is one that the server has not closed meanwhile."""
        sent_at = time.monotonic()
        problem = f"no answer within {self._timeout_s:g} s"
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._idle:
                    answer = await self._ask_on(self._idle.pop(), request)
                    if answer.pieces:
                        return answer
                return await self._ask_on(await Connection.open(self._wire.address), request)
        except TimeoutError:
            pass
        except OSError as error:
            problem = f"no connection: {error.strerror or error}"
        return Answer(sent_at, problem=problem, ended_at=time.monotonic())

    async def _ask_on(self, connection: Connection, request: bytes) -> Answer:
        answer = await connection.ask(request)
        if connection.is_open and answer.is_whole:
            self._idle.append(connection)
        elif connection.is_open:
            connection.close()
        return answer


def _content(said: Turn | str) -> str | list[dict[str, Any]]:
    if isinstance(said, str):
        return said
    if not said.images:
        return said.text
    pictures: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in said.images]
    return [*pictures, {"type": "text", "text": said.text}]
