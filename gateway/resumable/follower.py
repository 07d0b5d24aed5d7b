"""Follows a stream that another gateway generates, until it has ended, or takes it over when that gateway is dead.

Entries are read before the fence of their writer. If the fence still stands, they were logged before any process
revoked it, so a process that takes the stream over has them too, and they may be shown.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from gateway.errors import ApiError
from gateway.resumable.calls import OwnerCalls
from gateway.resumable.live import LiveStream
from gateway.resumable.log import ERRORS, StreamLog, no_longer_kept, stopped, unavailable
from gateway.resumable.owner import StreamOwner
from gateway.resumable.record import FIRST_PART, LAST_PART, MIDDLE_PART, PIECE_BYTES, decode_piece
from gateway.resumable.writer import OUTAGE_S

MIN_POLL_S = 0.02
MAX_POLL_S = 0.25
# Polls of one process are this far apart at least: hundreds of streams are followed at once only after a death.
POLL_OF_EACH_S = 0.001
_GROWTH = 1.3
CALL_INTERVAL_S = 0.25
# After this many calls, an owner that does not know its stream will never record its end.
_MAX_DENIALS = 8
_MAX_GAPS = 20

_log = logging.getLogger(__name__)


class PiecesGoneError(Exception):
    """Pieces are not there: they are dropped, or the stream has another owner, which has written its own."""


class LogReader:
    """Takes entries into a stream; shows none of them."""

    def __init__(self, log: StreamLog, stream: LiveStream) -> None:
        self._log = log
        self._stream = stream
        self._owner = ""
        # Number of the last message of the last piece that was read, which may have grown.
        self._number = 0
        # Entries that the stream had when the last piece of several messages was read.
        self._num_read = 0

    async def read(self) -> None:
        """Take the entries that the stream lacks; `ApiError` 410, `PiecesGoneError` if none are there, or `ERRORS`."""
        head = self._stream.head
        if head.owner != self._owner:
            self._owner, self._number = head.owner, 0
        for _ in range(_MAX_GAPS):
            pieces = await self._log.pieces(head, self._number)
            if not pieces and (self._stream.entries or head.term or head.ended is not None):
                self._number = 0
                raise PiecesGoneError
            if self._take_all(pieces):
                self._stream.is_read.set()
                return
            # The stream may have fewer entries than when the last piece was read: those that may not be shown go.
            self._number = 0
        raise no_longer_kept(head.id, "a piece of it is missing")

    def _take_all(self, messages: list[bytes]) -> bool:
        """Take the new entries of messages, the last piece only if it is whole; False as `_take` does."""
        parts: list[bytes] = []
        for number, message in enumerate(messages, self._number):
            mark, part = message[: len(FIRST_PART)], message[len(FIRST_PART) :]
            if mark not in (FIRST_PART, MIDDLE_PART, LAST_PART):
                is_taken = self._take(number, message)
            elif mark == FIRST_PART:
                parts, is_taken = [part], True
            elif mark == MIDDLE_PART or parts:
                parts.append(part)
                is_taken = True
                if mark == LAST_PART:
                    is_taken, parts = self._take(number, b"".join(parts)), []
                    self._num_read = len(self._stream.entries)
            else:
                # The last part alone: its piece was read before.
                is_taken = len(self._stream.entries) >= self._num_read
            if not is_taken:
                return False
        return True

    def _take(self, number: int, piece: bytes) -> bool:
        """Take the new entries of a piece; False if it begins behind them, and nothing was taken."""
        try:
            start, entries = decode_piece(piece)
        except msgspec.MsgspecError:
            raise no_longer_kept(self._stream.head.id, "it cannot be read") from None
        num_known = len(self._stream.entries)
        if start > num_known:
            return False
        self._stream.entries.extend(entries[num_known - start :])
        self._number = number
        self._stream.num_read_bytes = (number + 1) * PIECE_BYTES
        return True


class Follower:
    """Follows one stream."""

    def __init__(self, log: StreamLog, calls: OwnerCalls, owner: StreamOwner, stream: LiveStream) -> None:
        self._log = log
        self._calls = calls
        self._owner = owner
        self._stream = stream
        self._reader = LogReader(log, stream)
        self._loop = asyncio.get_running_loop()
        self._called_at: float | None = None
        self._num_denials = 0
        # Entries that the owner has shown: it writes the pieces of a stream once it knows that a process reads them.
        self._num_due = 0

    async def follow(self, num_followed: set[LiveStream]) -> None:
        """Show logged entries until the stream ends or this process owns it; `num_followed`: all followed streams."""
        stream, wait_s, failing_since = self._stream, MIN_POLL_S, self._loop.time()
        while not stream.ended.done() and not stream.is_owned:
            try:
                wait_s = MIN_POLL_S if await self._poll() else min(wait_s * _GROWTH, MAX_POLL_S)
                failing_since = self._loop.time()
            except ApiError as error:
                if error.status != 503 or stream.is_deleted or self._loop.time() - failing_since > OUTAGE_S:
                    self._abort(error)
            except ERRORS as error:
                if self._loop.time() - failing_since > OUTAGE_S:
                    _log.warning("the log of streams cannot be read: %r", error)
                    self._abort(unavailable())
            if not stream.is_owned:
                await asyncio.sleep(max(wait_s, POLL_OF_EACH_S * len(num_followed)))

    def _abort(self, error: ApiError) -> None:
        """End a stream of which nothing more can be read: what a client has deleted has no log any more."""
        self._stream.abort(stopped() if self._stream.is_deleted else error)

    async def _poll(self) -> bool:
        """As `_advance`; `ApiError` 503 while pieces that are not there may come back, 410 if they are gone."""
        try:
            return await self._advance()
        except PiecesGoneError:
            await self._look_for_pieces()
            return False

    async def _advance(self) -> bool:
        """Read new entries, and check the owner; return whether there was something new."""
        stream = self._stream
        # First of all: an owner that is known to be dead needs no reading of pieces and fence, and one that is alive
        # writes the pieces that are read next.
        if stream.head.ended is None and self._called_at is None and not await self._call():
            return False
        if not await stream.wait_for_turn():
            return False
        if stream.head.ended is not None:
            await self._read_end()
            return True
        num_known = len(stream.entries)
        await self._reader.read()
        has_new = len(stream.entries) > num_known
        if has_new or not stream.caught_up.is_set():
            fence = await self._log.fences.find(stream.head.owner)
            if fence is None or not fence.is_own:
                del stream.entries[stream.num_shown :]
                await self._look_again(is_dead=fence is not None)
                return has_new
            stream.show(len(stream.entries))
        if not has_new and self._called_at is not None and self._loop.time() - self._called_at > CALL_INTERVAL_S:
            await self._call()
        if not stream.is_owned and stream.num_shown >= self._num_due:
            stream.caught_up.set()
        return has_new

    async def _call(self) -> bool:
        """Tell the owner that the stream is read here; False if it does not have it, after which all may be another."""
        is_first, self._called_at = self._called_at is None, self._loop.time()
        reply = await self._calls.ask(self._stream.head, "watch")
        if reply is None and is_first and self._stream.head.ended is None:
            # The head was read a moment ago. If it is another one by now, it cannot be replaced.
            await self._take_over()
            return False
        if reply is None or not reply.is_known:
            await self._look_again(is_dead=reply is None)
            return False
        self._num_due = max(self._num_due, reply.num_shown)
        return True

    async def _look_for_pieces(self) -> None:
        """Take the head again, of which a takeover has deleted the previous owner's pieces; raise as `_poll`."""
        stream = self._stream
        # First of all: an owner whose log was lost with NATS writes the pieces again, and then its fence.
        fence = await self._log.fences.find(stream.head.owner)
        found = await self._log.find(stream.head.tenant, stream.head.id)
        if found is not None and found.seq != stream.seq:
            stream.head, stream.seq = found
            self._called_at = None
        elif fence is None and stream.head.ended is None:
            raise unavailable()
        else:
            try:
                await self._reader.read()
            except PiecesGoneError:
                raise no_longer_kept(stream.head.id, "its pieces are gone") from None
        # Those that were read here are read again, with the fence of their writer.
        del stream.entries[stream.num_shown :]

    async def _read_end(self) -> None:
        stream = self._stream
        await self._reader.read()
        if not stream.has_last_entry:
            raise no_longer_kept(stream.head.id, "its end is missing")
        stream.show(len(stream.entries))

    async def _look_again(self, *, is_dead: bool) -> None:
        """Read the head again, whose owner does not have the stream any more; take it over if the owner is dead."""
        stream = self._stream
        found = await self._log.find(stream.head.tenant, stream.head.id)
        if found is None or found.head.is_cut:
            raise unavailable() if found is None else no_longer_kept(stream.head.id, "it was too large")
        is_same = found.head.owner == stream.head.owner and found.head.ended is None
        stream.head, stream.seq = found
        if not is_same:
            self._num_denials, self._called_at = 0, None
            return
        self._num_denials += not is_dead
        if is_dead or self._num_denials > _MAX_DENIALS:
            await self._take_over()

    async def _take_over(self) -> None:
        stream = self._stream
        if not await stream.wait_for_turn():
            return
        _log.warning("stream %s is taken over from a gateway that is gone", stream.head.id)
        # A client that leaves now does not end it: that would be half a takeover.
        stream.is_held = True
        try:
            # It may show entries that it has written itself without knowing that it owns the stream.
            is_own = stream.head.owner == self._owner.writer.name
            tail = None if is_own else await self._log.fences.revoke(stream.head.owner)
            await self._reader.read()
            if tail is not None:
                tail.extend(stream.head, stream.entries)
            if stream.has_last_entry:
                # The writer is gone: the log is complete.
                stream.show(len(stream.entries))
            else:
                await self._owner.take_over(stream)
        finally:
            stream.is_held = False
        if not (stream.is_owned or stream.has_views):
            stream.end()
