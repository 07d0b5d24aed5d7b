"""The fences and journals of writers in JetStream.

A fence names the writer that may show its entries: `LogWriter` writes it with compare-and-set at the end of each round,
and a takeover writes to it first. It names the messages of the writer's journal that may hold entries which the
pieces of its streams lack.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import NamedTuple

from nats.js import JetStreamContext
from nats.js.errors import APIError

from gateway.resumable.journal import SLOTS, JournalTail, Span
from gateway.resumable.store import MessageStore
from shared.background_tasks import BackgroundTasks
from shared.nats_connection import SEND_ERRORS
from shared.streams import STREAMS_STREAM
from shared.subjects import fence_subject, journal_subject

# A fence is not revoked again within this time, for the other streams of its writer.
REVOKED_S = 2.0
_MAX_REVOKED = 64
# Header of a fence: the journal's span. Earlier versions write no journal, and no header.
_SPAN = "Hr-Journal"
# A dead writer's journal is kept this long. Streams not taken over by then lose entries that only it holds.
_JOURNAL_KEPT_S = 600.0
# Messages of a journal that are requested at once.
_AHEAD = 64
_ERRORS: tuple[type[Exception], ...] = (APIError, *SEND_ERRORS)


class Fence(NamedTuple):
    """The last message of a fence, with its number; `span` names the journal's messages that pieces may lack."""

    is_own: bool
    seq: int
    span: Span = (0, 0)


class _Revoked(NamedTuple):
    at: float
    tail: asyncio.Task[JournalTail]


class Fences:
    """Reads and writes fences and journals. Methods raise one of the log's `ERRORS` where NATS does not answer."""

    def __init__(self, store: MessageStore, js: JetStreamContext) -> None:
        self._store = store
        self._js = js
        self._revoked: dict[str, _Revoked] = {}
        self._tasks = BackgroundTasks()
        self._is_closed = False

    async def close(self) -> None:
        """Wait for running tasks."""
        self._is_closed = True
        await self._tasks.wait()

    def send_journal(self, writer: str, number: int, payload: bytes) -> None:
        """Write a message of a writer's journal without waiting; the next fence that is stored says that it is, too."""
        self._store.send(journal_subject(writer, number % SLOTS), payload)

    def write(self, writer: str, seq: int, span: Span) -> Awaitable[int | None]:
        """Write a writer's fence, whose last message is `seq` (`MessageStore.write`)."""
        return self._store.write(fence_subject(writer), writer.encode(), seq, _span_header(span))

    async def find(self, writer: str) -> Fence | None:
        """Return the fence of a writer; a JetStream stream that was made anew has none."""
        message = await self._store.last(fence_subject(writer))
        if message is None:
            return None
        first, _, end = message.header(_SPAN, "0-0").partition("-")
        return Fence(message.data == writer.encode(), message.seq, (int(first), int(end)))

    async def revoke(self, writer: str) -> JournalTail:
        """Keep a writer from showing entries that it writes from now on; return the end of its journal."""
        known = self._revoked.get(writer)
        if known is None or time.monotonic() - known.at > REVOKED_S:
            if len(self._revoked) >= _MAX_REVOKED:
                del self._revoked[next(iter(self._revoked))]
            known = _Revoked(time.monotonic(), self._tasks.spawn(self._revoke(writer), f"end of writer {writer}"))
            self._revoked[writer] = known
        try:
            return await asyncio.shield(known.tail)
        except _ERRORS:
            if self._revoked.get(writer) is known:
                del self._revoked[writer]
            raise

    async def _revoke(self, writer: str) -> JournalTail:
        while True:
            fence = await self.find(writer) or Fence(True, 0)
            if not fence.is_own:
                return JournalTail(await self._journal(writer, fence.span))
            header = _span_header(fence.span)
            if await self._store.write(fence_subject(writer), b"revoked", fence.seq, header) is not None:
                asyncio.get_running_loop().call_later(_JOURNAL_KEPT_S, self._drop_later, writer)
                return JournalTail(await self._journal(writer, fence.span))

    async def _journal(self, writer: str, span: Span) -> list[tuple[int, bytes]]:
        """Return messages of a journal with their numbers, those that are there."""
        numbers, found = range(*span)[-SLOTS:], list[tuple[int, bytes]]()
        for start in range(0, len(numbers), _AHEAD):
            several = numbers[start : start + _AHEAD]
            messages = await asyncio.gather(*(self._message(writer, number) for number in several))
            found += [(number, each) for number, each in zip(several, messages, strict=True) if each is not None]
        return found

    async def _message(self, writer: str, number: int) -> bytes | None:
        found = await self._store.last(journal_subject(writer, number % SLOTS))
        return None if found is None else found.data

    def _drop_later(self, writer: str) -> None:
        if not self._is_closed:
            self._tasks.spawn(self._drop(writer), f"purge of the journal of {writer}")

    async def _drop(self, writer: str) -> None:
        with contextlib.suppress(*_ERRORS):
            await self._js.purge_stream(STREAMS_STREAM, subject=journal_subject(writer))


def _span_header(span: Span) -> str:
    return f"{_SPAN}: {span[0]}-{span[1]}\r\n"
