"""Two ways for contents to go from one worker to another, on a connection that names them: as bytes, or as places.

Between hosts a content's bytes follow its header (`Sender`, `Receiver`). On one host the receiver has the sender's
memory (`shared_memory`), is told the place, and reads it there (`SharedSender`, `SharedReceiver`). Either way the same
header is verified over the bytes that have arrived. A lease holds the rows until the receiver says that it has all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from collections.abc import Sequence as Values
from struct import Struct
from typing import Any, NamedTuple

from gpu_worker.execution.tiers.file_format import HEADER_BYTES
from gpu_worker.execution.tiers.peer_wire import Kind, PeerError, receive_file, receive_frame, send_file, send_frame

Name = tuple[int, bytes]
"""A content's group and chain digest."""

_PLACE = Struct(f"<q{HEADER_BYTES}s")
"""Where a content is, negative where there is none, and its header."""


class Found(NamedTuple):
    """A content that is sent: its place in the memory that is shared, its header, and its bytes."""

    place: int
    header: bytes
    payload: memoryview


class Sender:
    """Sends contents as bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def begin(self) -> None:
        """Send what the receiver needs first."""

    def send(self, found: Iterable[Found | None]) -> None:
        """Answer a question with each content that it is about, None where there is none; what is given is not kept."""
        for each in found:
            if each is None:
                send_frame(self._connection, Kind.MISSING)
            else:
                send_frame(self._connection, Kind.BLOCK, each.header, each.payload)


class SharedSender(Sender):
    """Sends the memory, then where contents are in it."""

    def __init__(self, connection: socket.socket, file: int) -> None:
        super().__init__(connection)
        self._file = file

    def begin(self) -> None:
        """Send the memory, as a file."""
        send_file(self._connection, Kind.SHARED, self._file)

    def send(self, found: Iterable[Found | None]) -> None:
        """Send one frame for all."""
        places = [_PLACE.pack(-1, b"") if each is None else _PLACE.pack(each.place, each.header) for each in found]
        send_frame(self._connection, Kind.PLACES, *places)


class Receiver:
    """Receives contents as bytes. One thread at a time calls `begin` and `receive`, any `content`."""

    def __init__(self, connection: socket.socket, rows: Values[int]) -> None:
        """Receive contents of `rows[group]` bytes."""
        self._connection = connection
        self._rows = rows

    def begin(self) -> None:
        """Receive what comes first."""

    def receive(self, asked: Values[Name]) -> Values[Any]:
        """Wait for the first or more of the contents that were asked for; None stands for one that there is not."""
        kind, body = receive_frame(self._connection, HEADER_BYTES + self._rows[asked[0][0]])
        if kind not in (Kind.BLOCK, Kind.MISSING):
            raise PeerError(f"a frame {kind.name} came where a content was due")
        return [body if kind is Kind.BLOCK else None]

    def content(self, group: int, received: Any) -> bytearray:
        """Return header and bytes of a content that was received."""
        assert isinstance(received, bytearray)
        return received

    def close(self) -> None:
        """Let go of what `begin` has received."""


class SharedReceiver(Receiver):
    """Reads the sender's memory."""

    _file: int | None = None

    def begin(self) -> None:
        """Receive the memory, as a file."""
        kind, self._file = receive_file(self._connection)
        if kind is not Kind.SHARED or self._file is None:
            raise PeerError("the lease is not known there, or over")

    def receive(self, asked: Values[Name]) -> Values[Any]:
        """Receive where all are that were asked for."""
        kind, body = receive_frame(self._connection, len(asked) * _PLACE.size)
        if kind is not Kind.PLACES or len(body) != len(asked) * _PLACE.size:
            raise PeerError(f"a frame {kind.name} of {len(body)} bytes came where places were due")
        return [None if place[0] < 0 else place for place in _PLACE.iter_unpack(body)]

    def content(self, group: int, received: Any) -> bytearray:
        """Read a content at its place."""
        place, header = received
        data = bytearray(HEADER_BYTES + self._rows[group])
        data[:HEADER_BYTES] = header
        row = memoryview(data)[HEADER_BYTES:]
        if self._file is None or os.preadv(self._file, [row], place) != len(row):
            raise PeerError("a content is not where it is said to be")
        return data

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
