"""Reads the log of one stream that another gateway writes, or has written."""

from __future__ import annotations

import msgspec

from gateway.resumable.live import LiveStream
from gateway.resumable.log import StreamLog, no_longer_kept
from gateway.resumable.record import FIRST_PART, LAST_PART, MIDDLE_PART, decode_piece

_MAX_GAPS = 20


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
                raise PiecesGoneError
            if self._take_all(pieces):
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
        self._stream.entries += entries[num_known - start :]
        self._number = number
        return True
