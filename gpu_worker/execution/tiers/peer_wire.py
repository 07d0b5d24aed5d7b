"""Frames between a worker that keeps KV under leases and one that fetches it.

Length (4 bytes, little endian, of the rest), kind (1 byte), body. The client opens a lease and gets the names of its
contents; then it asks for some, many at once, gets them in that order, and says in the end that it has all it wants.
The longest valid length is known before a frame is read, and a peer that is slow amid a frame is given up.

Between hosts a content's bytes follow its header (`Sender`, `Receiver`). On one host the receiver has the sender's
memory (`shared_memory`), gets the place, and reads it there (`SharedSender`, `SharedReceiver`); where both
sides have NIXL, between hosts, too (`nixl_transport`). Either way the same header is verified over the bytes that have
arrived. A lease holds the rows until the receiver says that it has all.
"""

from __future__ import annotations

import enum
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Values
from struct import Struct
from typing import Any, NamedTuple

import msgspec

from gpu_worker.execution.tiers.file_format import HEADER_BYTES
from shared.bounds import Epoch, RequestId
from shared.disaggregation import LeaseToken

VERSION = 1
FRAME_S = 1.0
"""A frame that has begun is there after so long, or the other side is given up."""
MOST_FRAME_S = 10.0
"""The same of a long one whose bytes keep coming."""
ITEM = Struct("<H32s")
"""A content's name: group and chain digest."""
MAX_ASKED = 64
"""Contents that are asked for at once."""
MAX_REQUEST_BYTES = MAX_ASKED * ITEM.size
Name = tuple[int, bytes]
"""A content's group and chain digest."""
_PLACE = Struct(f"<q{HEADER_BYTES}s")
"""Where a content is, negative where there is none, and its header."""
_HEAD = Struct("<IB")
_CHUNK_BYTES = 1 << 20


class Kind(enum.IntEnum):
    """What a frame is."""

    OPEN = 1
    GET = 2
    DONE = 3
    BLOCK = 5
    MISSING = 6
    REFUSED = 7
    SHARED = 8
    PLACES = 9
    CONTENTS = 10
    NIXL = 11


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """The body of `OPEN`. Only the previous version reads `asks_many`; it does not read `has_nixl`."""

    version: int
    lease: LeaseToken
    request: RequestId
    epoch: Epoch
    asks_many: bool = True
    has_nixl: bool = False


class PeerError(OSError):
    """The other side does not keep to the protocol, or is too slow."""


class PeerClosedError(PeerError):
    """The connection has ended: the other side closed it, or another thread of this one."""


class SlowPeerError(PeerError, TimeoutError):
    """The other side sends something, and not in time."""


def send_frame(connection: socket.socket, kind: Kind, *parts: bytes | memoryview) -> None:
    """Send a frame within the time for one; `OSError` if it cannot be sent."""
    connection.settimeout(FRAME_S)
    num_bytes = 1 + sum(map(len, parts))
    if num_bytes <= _CHUNK_BYTES:
        connection.sendall(b"".join((_HEAD.pack(num_bytes, kind), *parts)))
        return
    connection.sendall(_HEAD.pack(num_bytes, kind))
    for part in parts:
        # Each piece has time of its own: a large frame is slow, a connection that takes nothing is dead.
        for begin in range(0, len(part), _CHUNK_BYTES):
            connection.sendall(part[begin : begin + _CHUNK_BYTES])


def receive_frame(connection: socket.socket, most_bytes: int, wait_s: float | None = None) -> tuple[Kind, bytearray]:
    """Wait for a frame for `wait_s` seconds, or the time for one, and return its kind and body of `most_bytes` at most.

    Raises:
        OSError: None comes, it is too long or unknown, or the connection ends.
    """
    kind, num_bytes = _head(_receive(connection, _HEAD.size, FRAME_S if wait_s is None else wait_s), most_bytes)
    return kind, _receive(connection, num_bytes, FRAME_S)


def send_file(connection: socket.socket, kind: Kind, file: int) -> None:
    """Send a frame without a body that brings a file, over a Unix socket; `OSError` if it cannot be sent."""
    connection.settimeout(FRAME_S)
    socket.send_fds(connection, [_HEAD.pack(1, kind)], [file])


def receive_file(connection: socket.socket) -> tuple[Kind, int | None]:
    """Wait for a frame without a body, and return its kind and the file that has come with it, if one has.

    Raises:
        OSError: None comes, it is too long or unknown, or the connection ends.
    """
    connection.settimeout(FRAME_S)
    head, files, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    try:
        if len(head) != _HEAD.size:
            raise PeerClosedError("the other side has closed the connection")
        return _head(head, 0)[0], files[0] if files else None
    except PeerError:
        for file in files:
            os.close(file)
        raise


def _head(head: bytes | bytearray, most_bytes: int) -> tuple[Kind, int]:
    """Return a frame's kind and the length of its body."""
    num_bytes, number = _HEAD.unpack(head)
    if not 1 <= num_bytes <= 1 + most_bytes:
        raise PeerError(f"a frame has {num_bytes} bytes; at most {1 + most_bytes} were expected")
    try:
        return Kind(number), num_bytes - 1
    except ValueError:
        raise PeerError(f"a frame is of the unknown kind {number}") from None


def _receive(connection: socket.socket, num_bytes: int, wait_s: float) -> bytearray:
    data = bytearray(num_bytes)
    view, deadline = memoryview(data), time.monotonic() + wait_s
    last = deadline + MOST_FRAME_S
    while view:
        left = deadline - time.monotonic()
        if left <= 0:
            raise SlowPeerError("the other side is too slow")
        connection.settimeout(left)
        count = connection.recv_into(view[:_CHUNK_BYTES])
        if count == 0:
            raise PeerClosedError("the other side has closed the connection")
        if count >= _CHUNK_BYTES // 16:
            deadline = min(last, time.monotonic() + FRAME_S)
        view = view[count:]
    return data


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

    def wait(self, timeout_s: float) -> None:
        """Do what the receiver needs while it sends nothing, until a time is over."""

    def send(self, found: Iterable[Found | None]) -> None:
        """Answer a question with the contents it names, None for missing ones; the given objects are not kept."""
        for each in found:
            if each is None:
                send_frame(self._connection, Kind.MISSING)
            else:
                send_frame(self._connection, Kind.BLOCK, each.header, each.payload)


class PlaceSender(Sender, ABC):
    """Sends where contents are in memory that the receiver reads."""

    def send(self, found: Iterable[Found | None]) -> None:
        """Send one frame for all."""
        places = [
            _PLACE.pack(-1, b"") if each is None else _PLACE.pack(self._place(each), each.header) for each in found
        ]
        send_frame(self._connection, Kind.PLACES, *places)

    @abstractmethod
    def _place(self, found: Found) -> int:
        """Return the position of a content's payload, as the receiver addresses it."""


class SharedSender(PlaceSender):
    """Sends the memory, then where contents are in it."""

    def __init__(self, connection: socket.socket, file: int) -> None:
        super().__init__(connection)
        self._file = file

    def begin(self) -> None:
        """Send the memory, as a file."""
        send_file(self._connection, Kind.SHARED, self._file)

    def _place(self, found: Found) -> int:
        return found.place


class Receiver:
    """Receives contents as bytes. One thread at a time calls `begin` and `receive`, any `content`.

    Attributes:
        way: How contents come, for the log.
    """

    way = "fetched over TCP"

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


class PlaceReceiver(Receiver, ABC):
    """Reads contents in memory that is the sender's."""

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
        self._read(place, memoryview(data)[HEADER_BYTES:])
        return data

    @abstractmethod
    def _read(self, place: int, row: memoryview) -> None:
        """Copy the payload at a position of the sender's memory into `row`."""


class SharedReceiver(PlaceReceiver):
    """Reads memory that this process has as a file."""

    way = "read in its memory, on this host"
    _file: int | None = None

    def begin(self) -> None:
        """Receive the memory, as a file."""
        kind, self._file = receive_file(self._connection)
        if kind is not Kind.SHARED or self._file is None:
            raise PeerError("the lease is not known there, or over")

    def _read(self, place: int, row: memoryview) -> None:
        # Another thread may close it.
        file = self._file
        if file is None or os.preadv(file, [row], place) != len(row):
            raise PeerError("a content is not where it is said to be")

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
