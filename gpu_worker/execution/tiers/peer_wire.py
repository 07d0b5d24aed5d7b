"""Frames between a worker that keeps KV under leases and one that fetches it.

Length (4 bytes, little endian, of what follows), kind (1 byte), body. The client opens a lease and is told what there
is; then it asks for contents, many at once where the server is known to take that, gets them in that order
(`channels`), and says in the end that it has all it wants. What a frame may be long is known before it is read, and who
is slow amid a frame is given up.
"""

from __future__ import annotations

import enum
import os
import socket
import time
from struct import Struct

import msgspec

from shared.bounds import Epoch, RequestId
from shared.disaggregation import LeaseToken

VERSION = 1
FRAME_S = 1.0
"""A frame that has begun is there after so long, or the other side is given up."""
MOST_FRAME_S = 10.0
"""The same of a long one whose bytes keep coming."""
DIGEST_BYTES = 32
ITEM = Struct("<H32s")
"""A content's name: group and chain digest."""
MAX_ASKED = 64
"""Contents that are asked for at once."""
MAX_REQUEST_BYTES = MAX_ASKED * ITEM.size
_HEAD = Struct("<IB")
_CHUNK_BYTES = 1 << 20


class Kind(enum.IntEnum):
    """What a frame is."""

    OPEN = 1
    GET = 2
    DONE = 3
    CONTENTS = 4
    BLOCK = 5
    MISSING = 6
    REFUSED = 7
    SHARED = 8
    PLACES = 9
    CONTENTS_OF_MANY = 10
    """`CONTENTS` of a server that takes many names in a `GET`, to a client that `asks_many`."""


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """The body of `OPEN`."""

    version: int
    lease: LeaseToken
    request: RequestId
    epoch: Epoch
    asks_many: bool = False


class PeerError(OSError):
    """The other side does not keep to the protocol, or is too slow."""


def send_frame(connection: socket.socket, kind: Kind, *parts: bytes | memoryview) -> None:
    """Send a frame within the time for one.

    Raises:
        OSError: It cannot be sent.
    """
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
    """Send a frame without a body that brings a file, over a Unix socket.

    Raises:
        OSError: It cannot be sent.
    """
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
            raise PeerError("the other side has closed the connection")
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
            raise PeerError("the other side is too slow")
        connection.settimeout(left)
        count = connection.recv_into(view[:_CHUNK_BYTES])
        if count == 0:
            raise PeerError("the other side has closed the connection")
        if count >= _CHUNK_BYTES // 16:
            deadline = min(last, time.monotonic() + FRAME_S)
        view = view[count:]
    return data
