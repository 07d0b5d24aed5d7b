"""Writes the logs of the streams that this process generates, in rounds: pieces and journal first, then the fence.

A round takes what came since the one before, so that one acknowledgement stands for the tokens of all streams; the
first entries of a stream do not wait for it. The fence is a message that names this writer, written only if it is still
the last one of its subject. A process that takes streams over writes to it first: then rounds of the old owner fail.

New entries go into the journal, and into pieces later, unless another process reads the pieces: a stream that is
followed, one that ends, and all streams while a gateway runs that reads no journal.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable

from nats.js.errors import NoStreamResponseError

from gateway.resumable.journal import JournalWriter
from gateway.resumable.live import LiveStream
from gateway.resumable.log import ERRORS, StreamLog
from gateway.resumable.record import PieceWriter
from shared.background_tasks import BackgroundTasks
from shared.log_limit import LogLimit

# Rounds begin this far apart, and those of many streams further: a round then takes several tokens of each, which costs
# little more than one. The first entries of a stream do not wait for that.
MIN_ROUND_S = 0.005
MAX_ROUND_S = 0.04
_ROUND_OF_EACH_S = 0.001
# A round with more pieces than that is followed by a pause as long as it took, up to a bound.
_MANY_PIECES = 64
MAX_PAUSE_S = 0.05
_RETRY_S = 0.1
# NATS that is replaced, or elects a leader, is back by then.
OUTAGE_S = 20.0

# A stream, the entries of a round by the number of the first and of the one after the last, and their array if the
# journal has it.
_Written = tuple[LiveStream, int, int, bytes | None]

_log = logging.getLogger(__name__)


class LogWriter:
    """Writes under one name.

    Attributes:
        name: Its name, which no other process has and none has had.
        owned: The streams that it writes, and their pieces.
        is_revoked: Another process has taken its streams over.
    """

    def __init__(
        self,
        log: StreamLog,
        max_stream_bytes: int,
        may_use_journal: Callable[[], bool],
        on_revoked: Callable[[], None],
        on_silent: Callable[[LiveStream], None],
        on_lost: Callable[[LiveStream], None],
        on_large: Callable[[LiveStream], None],
    ) -> None:
        """Write up to `max_stream_bytes` of each stream to `log`.

        `may_use_journal` says, once a round, whether the gateways that may take over read the journal. `on_revoked` is
        called once, when another process has taken the streams over. The others are called with a stream: `on_silent`
        when it has waited for `OUTAGE_S`, `on_lost` when its head was lost with NATS and has to be written again,
        `on_large` when it has more entries than it may.
        """
        self.name = secrets.token_hex(8)
        self.owned: dict[LiveStream, PieceWriter] = {}
        self.is_revoked = False
        self._log = log
        self._max_stream_bytes = max_stream_bytes
        self._may_use_journal = may_use_journal
        self._journal = JournalWriter()
        self._num_pieces = 0
        self._on_revoked = on_revoked
        self._on_silent = on_silent
        self._on_lost = on_lost
        self._on_large = on_large
        self._seq = 0
        self._dirty: dict[LiveStream, None] = {}
        # Those of them that do not wait until the next round is due.
        self._urgent: dict[LiveStream, None] = {}
        self._is_urgent = False
        # Of the next round, and of one with urgent streams, by `time.monotonic()`.
        self._due_at = self._urgent_at = 0.0
        # Set while the task waits for the next round, and the timer while there is something to write.
        self._waker: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()
        self._failing_since: float | None = None
        self._waiting: dict[LiveStream, asyncio.Future[bool]] = {}
        self._log_limit = LogLimit(_log)

    def own(self, stream: LiveStream) -> None:
        """Write a stream from its first entry on."""
        self.owned[stream] = stream.pieces = PieceWriter()

    def disown(self, stream: LiveStream) -> None:
        """Write nothing more of a stream."""
        self.owned.pop(stream, None)
        self._dirty.pop(stream, None)
        stream.is_noted = False
        self._urgent.pop(stream, None)
        self._journal.forget(stream)
        self._settled(stream, False)

    def note(self, stream: LiveStream) -> None:
        """Write the new entries of a stream in the next round. This runs once per round and stream."""
        self._dirty[stream] = None
        stream.is_noted = True
        if not stream.num_shown and stream.num_entries:
            self._hurry(stream)
        elif self._timer is None:
            self._schedule()
        if self._task is None and not self.is_revoked:
            self._task = self._tasks.spawn(self._run(), "log of streams")

    async def settle(self, stream: LiveStream) -> bool:
        """Wait until the log has the entries that a stream has now; False if that does not become true."""
        waiting = self._waiting.setdefault(stream, asyncio.get_running_loop().create_future())
        self.note(stream)
        self._hurry(stream)
        return await waiting

    def _hurry(self, stream: LiveStream) -> None:
        self._urgent[stream] = None
        self._schedule()

    async def close(self) -> None:
        """Write nothing more."""
        self.is_revoked = True
        if self._task is not None:
            self._task.cancel()
        await self._tasks.wait()
        for stream in list(self._waiting):
            self._settled(stream, False)

    async def _run(self) -> None:
        while not self.is_revoked:
            await self._wait_until_due()
            began = time.monotonic()
            streams = self._take(began)
            if streams and not await self._round(streams):
                self._dirty.update({stream: None for stream in streams if stream in self.owned})
                self._due_at = self._urgent_at = 0.0
                self._give_up_silent()
                await asyncio.sleep(_RETRY_S)
            elif self._num_pieces > _MANY_PIECES:
                ended = time.monotonic()
                self._due_at = max(self._due_at, ended + min(MAX_PAUSE_S, ended - began))

    def _take(self, now: float) -> list[LiveStream]:
        """Return the streams of the next round: all that have something new, or before it is due the urgent ones."""
        self._is_urgent = bool(self._urgent) and now < self._due_at
        self._urgent_at = now + MIN_ROUND_S
        if self._is_urgent:
            streams = list(self._urgent)
            for stream in streams:
                self._dirty.pop(stream, None)
        else:
            streams, self._dirty = list(self._dirty), {}
            self._due_at = now + max(MIN_ROUND_S, min(MAX_ROUND_S, len(streams) * _ROUND_OF_EACH_S))
        self._urgent.clear()
        for stream in streams:
            stream.is_noted = False
        return streams

    async def _wait_until_due(self) -> None:
        self._waker = asyncio.get_running_loop().create_future()
        if self._dirty:
            self._schedule()
        try:
            await self._waker
        finally:
            self._waker = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _schedule(self) -> None:
        """Let the task go on when its next round is due, if it waits for that."""
        if self._waker is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        due_at = self._urgent_at if self._urgent else self._due_at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due_at - time.monotonic()), self._wake)

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def _round(self, streams: Iterable[LiveStream]) -> bool:
        """Write the new entries of streams, and show them when the log has them; False if it does not answer."""
        try:
            # The fence goes out with the messages that it confirms.
            with self._log.together():
                written = self._write(streams)
                fence = self._log.fences.write(self.name, self._seq, self._journal.span)
            seq = await fence
            if seq is None:
                return await self._explain()
        except NoStreamResponseError:
            await self._begin_anew()
            return False
        except ERRORS as error:
            self._log_limit.warning("", "the log of streams could not be written: %r", error)
            self._failing_since = self._failing_since or time.monotonic()
            # Sent messages may be lost, with the connection for example.
            self._rewrite()
            return False
        self._seq, self._failing_since = seq, None
        for stream, start, up_to, array in written:
            if not (stream.is_held or stream.is_cut):
                stream.show(up_to, array if start == stream.num_shown else None)
            if self._waiting:
                self._settled(stream, True)
        return True

    def _settled(self, stream: LiveStream, is_done: bool) -> None:
        waiting = self._waiting.pop(stream, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(is_done)

    def _write(self, streams: Iterable[LiveStream]) -> list[_Written]:
        """Write the new entries of streams."""
        may_use_journal, self._num_pieces = self._may_use_journal(), 0
        for stream in self._journal.due(is_all=not may_use_journal, is_urgent=self._is_urgent):
            self._write_pieces(stream)
        written: list[_Written] = []
        for stream in streams:
            pieces = self.owned.get(stream)
            if pieces is None:
                continue
            start, array = pieces.num_logged, None
            # Readers of pieces alone find in them how a stream has ended.
            if may_use_journal and pieces.has_begun and not (stream.is_ending or stream.is_followed or stream.is_cut):
                array = self._journal.add(stream)
            else:
                self._write_pieces(stream)
            written.append((stream, start, pieces.num_logged, array))
        messages, too_large = self._journal.messages()
        for number, payload in messages:
            self._log.fences.send_journal(self.name, number, payload)
        for stream in too_large:
            self._write_pieces(stream)
        return written

    def _write_pieces(self, stream: LiveStream) -> None:
        self._journal.forget(stream)
        pieces, head = stream.pieces, stream.head
        assert pieces is not None
        if stream.is_cut or (pieces.has_begun and stream.num_entries == pieces.num_entries):
            return
        # The first message was counted with the head.
        num_counted = max(1, pieces.num_messages)
        changed = pieces.put(stream.since(pieces.num_logged))
        stream.is_ending = False
        self._num_pieces += len(changed)
        for number, payload in changed:
            self._log.send(head.tenant, head.id, head.owner, number, payload=payload)
        if pieces.num_messages > num_counted:
            self._log.count(head.tenant, pieces.num_messages - num_counted)
        if pieces.num_bytes > self._max_stream_bytes:
            # Later entries are shown as they come.
            stream.is_noted = False
            self._on_large(stream)

    async def _explain(self) -> bool:
        """Find out why the fence is another one: a process has revoked it, or the log is a new one."""
        found = await self._log.fences.find(self.name)
        if found is None:
            await self._begin_anew()
        elif found.is_own:
            # The acknowledgement of the last round was lost.
            self._seq = found.seq
        else:
            self.is_revoked = True
            for stream in list(self._waiting):
                self._settled(stream, False)
            self._on_revoked()
        return False

    async def _begin_anew(self) -> None:
        try:
            await self._log.ensure()
        except ERRORS as error:
            self._log_limit.warning("", "the log of streams could not be made: %r", error)
            self._failing_since = self._failing_since or time.monotonic()
            return
        self._seq = 0
        self._rewrite()
        for stream in list(self.owned):
            self._on_lost(stream)

    def _rewrite(self) -> None:
        """Write all entries once more, in pieces of the same numbers."""
        self._journal.clear()
        for stream in self.owned:
            self.owned[stream] = stream.pieces = PieceWriter()
            self._dirty[stream] = None

    def _give_up_silent(self) -> None:
        if self._failing_since is None or time.monotonic() - self._failing_since < OUTAGE_S:
            return
        for stream in list(self.owned):
            self._on_silent(stream)
