"""The journal of a writer: in each round one message with the new entries of all its streams.

Pieces belong to one stream and grow, so writing them in every round costs a message a token. The journal takes new
entries instead, and a round writes the pieces of a few streams in turn, those first whose pieces have been behind for
longest. Only who takes streams over reads the journal: the fence names the messages that may hold entries which the
pieces lack. A journal has `SLOTS` subjects, which are used in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Raw

from gateway.resumable.live import LiveStream
from gateway.resumable.record import Entry, StreamHead, encode

SLOTS = 256
# Each round writes the pieces of the n-th part of the streams whose pieces are behind.
_TURNS = 48
# No stream is behind for more messages, so that what the fence names is still there.
_MAX_BEHIND = SLOTS // 2
# Of one message, beside one part.
_MESSAGE_BYTES = 128 << 10
# Larger news of a stream, and what a round has more in all, are written as pieces.
_PART_BYTES = 32 << 10
_ROUND_BYTES = 1 << 20

# Tenant and id of a stream, the number of the first of its new entries, and those.
_Part = tuple[str, str, int, Raw]
_decode_message = msgspec.msgpack.Decoder(tuple[int, list[_Part]]).decode
_decode_entries = msgspec.msgpack.Decoder(list[Entry]).decode

Span = tuple[int, int]
"""The numbers of messages of a journal: the first one, and the one after the last."""


class JournalWriter:
    """Collects the journal of a round, and knows which streams' pieces are behind it."""

    def __init__(self) -> None:
        self._next = 0
        # By stream: the message with the first entry that its pieces lack, and how many entries the journal has. Those
        # that are behind for longest come first.
        self._behind: dict[LiveStream, tuple[int, int]] = {}
        self._parts: list[bytes] = []
        self._num_bytes = 0

    @property
    def span(self) -> Span:
        """The messages that may hold entries which pieces lack."""
        first, _ = next(iter(self._behind.values()), (self._next, 0))
        return first, self._next

    def add(self, stream: LiveStream, up_to: int) -> bool:
        """Take the entries of a stream before number `up_to`; False if they are too large: its pieces are due."""
        assert stream.pieces is not None
        first, start = self._behind.get(stream) or (self._next, stream.pieces.num_entries)
        if up_to == start:
            return True
        part = encode((stream.head.tenant, stream.head.id, start, stream.entries[start:up_to]))
        self._num_bytes += len(part)
        if len(part) > _PART_BYTES or self._num_bytes > _ROUND_BYTES:
            return False
        self._parts.append(part)
        self._behind[stream] = first, up_to
        return True

    def due(self, *, is_all: bool) -> list[LiveStream]:
        """Return the streams whose pieces this round has to write."""
        count = len(self._behind) if is_all else -(-len(self._behind) // _TURNS)
        oldest = self._next - _MAX_BEHIND
        due: list[LiveStream] = []
        for stream, (first, _) in self._behind.items():
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
        self._parts.clear()

    def messages(self) -> list[tuple[int, bytes]]:
        """Return the messages of this round with their numbers."""
        parts, self._parts, self._num_bytes = self._parts, [], 0
        messages: list[tuple[int, bytes]] = []
        for several in _bounded(parts):
            messages.append((self._next, encode((self._next, list(map(Raw, several))))))
            self._next += 1
        return messages


def _bounded(parts: Sequence[bytes]) -> Iterable[list[bytes]]:
    """Split parts into lists of bounded size."""
    several: list[bytes] = []
    size = 0
    for part in parts:
        if several and size + len(part) > _MESSAGE_BYTES:
            yield several
            several, size = [], 0
        several.append(part)
        size += len(part)
    if several:
        yield several


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
                entries += _decode_entries(part)[len(entries) - start :]
