"""The journal of a writer: in each round one message with the new entries of all its streams.

Pieces belong to one stream and grow, so writing them in every round costs a message a token. The journal takes new
entries instead, and a round writes the pieces of a few streams in turn, those first whose pieces have been behind for
longest. Only a takeover reads the journal: the fence names the messages that may hold entries which the
pieces lack. A journal has `SLOTS` subjects, which are used in turn.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Raw

from gateway.resumable.live import LiveStream
from gateway.resumable.record import Entry, StreamHead, decode_entries, encode

SLOTS = 256
# Each round writes the pieces of the n-th part of the streams whose pieces are behind.
_TURNS = 96
# No stream is behind for more messages, so that the messages named by the fence still exist.
_MAX_BEHIND = SLOTS // 2
# Of one message. A part that is larger alone is written as pieces.
_MESSAGE_BYTES = 256 << 10

# Tenant and id of a stream, the number of the first of its new entries, and those.
_Part = tuple[str, str, int, Raw]
_decode_message = msgspec.msgpack.Decoder(tuple[int, list[_Part]]).decode

Span = tuple[int, int]
"""The numbers of messages of a journal: the first one, and the one after the last."""


class JournalWriter:
    """Collects the journal of a round, and knows which streams' pieces are behind it."""

    def __init__(self) -> None:
        self._next = 0
        # The message with the first entry that a stream's pieces lack; those that are behind for longest come first.
        self._behind: dict[LiveStream, int] = {}
        # New entries of streams, behind the number of the first.
        self._news: list[tuple[LiveStream, int, Raw]] = []

    @property
    def span(self) -> Span:
        """The messages that may hold entries which pieces lack."""
        return next(iter(self._behind.values()), self._next), self._next

    def add(self, stream: LiveStream) -> bytes | None:
        """Take the new entries of a stream; return their array. This runs once per round and stream."""
        pieces = stream.pieces
        assert pieces is not None
        start = pieces.num_logged
        new = stream.since(start)
        if not new:
            return None
        array = pieces.encode(new)
        self._news.append((stream, start, Raw(array)))
        self._behind.setdefault(stream, self._next)
        return array

    def due(self, *, is_all: bool, is_urgent: bool = False) -> list[LiveStream]:
        """Return the streams whose pieces this round has to write: in an urgent one, those that cannot wait longer."""
        count = len(self._behind) if is_all else 0 if is_urgent else -(-len(self._behind) // _TURNS)
        oldest = self._next - _MAX_BEHIND
        due: list[LiveStream] = []
        for stream, first in self._behind.items():
            if len(due) >= count and first >= oldest:
                break
            due.append(stream)
        return due

    def forget(self, stream: LiveStream) -> None:
        """Note that a stream's pieces have all its entries, or that it is written no more."""
        self._behind.pop(stream, None)

    def clear(self) -> None:
        """Forget all streams: their pieces are written from the beginning."""
        self._behind.clear()
        self._news.clear()

    def messages(self) -> tuple[list[tuple[int, bytes]], list[LiveStream]]:
        """Return the messages of this round with their numbers, and the streams whose news are too large for one."""
        messages: list[tuple[int, bytes]] = []
        too_large: list[LiveStream] = []
        waiting, self._news = [self._news], []
        while waiting:
            news = waiting.pop()
            if not news:
                continue
            parts = [(stream.head.tenant, stream.head.id, start, array) for stream, start, array in news]
            message = encode((self._next, parts))
            if len(message) <= _MESSAGE_BYTES:
                messages.append((self._next, message))
                self._next += 1
            elif len(news) == 1:
                too_large.append(news[0][0])
            else:
                middle = len(news) // 2
                waiting += [news[middle:], news[:middle]]
        return messages, too_large


class JournalTail:
    """The end of the journal of a writer that writes no more."""

    def __init__(self, messages: Iterable[tuple[int, bytes]]) -> None:
        """Read messages, given with their numbers. One that was overwritten counts as missing."""
        self._parts: dict[tuple[str, str], list[tuple[int, Raw]]] = {}
        for number, payload in messages:
            found, parts = _decode_message(payload)
            for tenant, stream_id, start, entries in parts if found == number else ():
                self._parts.setdefault((tenant, stream_id), []).append((start, entries))

    def extend(self, head: StreamHead, entries: list[Entry]) -> None:
        """Add to the entries of a stream, read from its pieces, those that only the journal has."""
        for start, part in self._parts.get((head.tenant, head.id), ()):
            if start <= len(entries):
                entries += decode_entries(part)[len(entries) - start :]
