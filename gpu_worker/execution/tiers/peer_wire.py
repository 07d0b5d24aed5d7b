"""Frames between a worker that keeps KV under leases and one that fetches it, over TCP.

Length (4 bytes, little endian, of what follows), kind (1 byte), body. The client opens a lease and is told what there
is; then it gets contents, each a header as in files and the bytes, and says in the end that it has all it wants. What a
frame may be long is known before it is read, and who is slow amid a frame is given up.
"""

from __future__ import annotations

import enum
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
MAX_REQUEST_BYTES = 512
DIGEST_BYTES = 32
ITEM = Struct("<H32s")
"""A content's name: group and chain digest."""
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


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """The body of `OPEN`."""

    version: int
    lease: LeaseToken
    request: RequestId
    epoch: Epoch


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


def receive_frame(connection: socket.socket, most_bytes: int, wait_s: float = FRAME_S) -> tuple[Kind, bytearray]:
    """Wait for a frame for `wait_s` seconds, and return its kind and body of `most_bytes` at most.

    Raises:
        OSError: None comes, it is too long or unknown, or the connection ends.
    """
    head = _receive(connection, _HEAD.size, wait_s)
    num_bytes, number = _HEAD.unpack(head)
    if not 1 <= num_bytes <= 1 + most_bytes:
        raise PeerError(f"a frame has {num_bytes} bytes; at most {1 + most_bytes} were expected")
    try:
        kind = Kind(number)
    except ValueError:
        raise PeerError(f"a frame is of the unknown kind {number}") from None
    return kind, _receive(connection, num_bytes - 1, FRAME_S)


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
