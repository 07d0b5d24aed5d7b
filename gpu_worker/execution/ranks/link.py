"""A connection between two hosts of a group, whose ends have shown each other that they know the group's token.

The token is not sent. Each message carries a code under a key of this connection, so that no one on the way can add,
change, repeat or reorder one; the content can be read there.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from msgspec.msgpack import Decoder

from shared.errors import HeadraceError

T = TypeVar("T")

_MAGIC = b"HRRANK02"
_HELLO = struct.Struct("<8sH32s")
_HEAD = struct.Struct("<I16s")
_PROOF_BYTES = 32
_CODE_BYTES = 16
_MAX_BYTES = 256 << 20
_HANDSHAKE_S = 5.0
_PROBE_AFTER_MS = 300
"""So early that the system has sent a probe three times by the end of `_SILENT_MS`."""
_SILENT_MS = 1_000
_GUARD_S = 0.05
_NUM_GUARDED = 4
"""Looks in a row that find nothing answered: something may have been sent a moment ago."""
_STUCK_MS = 30_000
# Of `tcp_info`: milliseconds since data was sent, and since data and an answer arrived.
_TCP_INFO = struct.Struct("<44xI4xII")
_MAX_STRANGERS = 16
_ACCEPTED = b"\x01"

_log = logging.getLogger(__name__)


class LinkError(HeadraceError):
    """The other end is not one of the group, or something on the way changes what it says.

    Attributes:
        is_final: Trying again does not help.
    """

    def __init__(self, problem: str, *, is_final: bool = False) -> None:
        super().__init__(problem)
        self.is_final = is_final


class Link:
    """One end. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._stream = connection.makefile("rb")
        self._keys = (sending, receiving)
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_MS)
            threading.Thread(target=self._guard, name="link", daemon=True).start()

    @property
    def address(self) -> str:
        """The address of this end."""
        return str(self._connection.getsockname()[0])

    def send(self, message: bytes) -> None:
        """Send an encoded message; `OSError` if the connection is gone."""
        with self._lock:
            code = _code(self._keys[0], self._num_sent, message)
            self._num_sent += 1
            self._connection.sendall(_HEAD.pack(len(message), code) + message)

    def receive(self, decoder: Decoder[T]) -> T | None:
        """Return the next message, None at the end; `LinkError` if it is not from the other end."""
        with contextlib.suppress(OSError, ValueError):
            while (message := self._next()) is not None:
                # An empty one is a probe.
                if message:
                    return decoder.decode(message)
        return None

    def _next(self) -> bytes | None:
        head = self._stream.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        size, code = _HEAD.unpack(head)
        if size > _MAX_BYTES:
            raise LinkError(f"a message of {size} bytes is longer than any of a group")
        message = self._stream.read(size)
        if len(message) < size:
            return None
        expected = _code(self._keys[1], self._num_received, message)
        self._num_received += 1
        if not hmac.compare_digest(code, expected):
            raise LinkError("a message was changed on its way, or is not from this group")
        return message

    def close(self) -> None:
        """End the connection; a thread that receives from it wakes up."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._stream.close()

    def _guard(self) -> None:
        """End the connection when the other host's system is silent: one without power or cable sends no end.

        Systems answer while processes are busy or stopped, and while nothing more fits into the connection, which a
        short `TCP_USER_TIMEOUT` would take for a dead host. A probe is an empty message, which the kernel retransmits
        until it is acknowledged. Not `SO_KEEPALIVE`: the kernel does not retransmit its probes.
        """
        num_unanswered = 0
        with contextlib.suppress(OSError):
            while not self._closed.wait(_GUARD_S):
                info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                sent_ms, *arrivals = _TCP_INFO.unpack(info)
                silent_ms = min(arrivals)
                is_unanswered = sent_ms < silent_ms
                if silent_ms > _PROBE_AFTER_MS and not is_unanswered:
                    self.send(b"")
                num_unanswered = num_unanswered + 1 if is_unanswered and silent_ms > _SILENT_MS else 0
                if num_unanswered == _NUM_GUARDED:
                    _log.warning("a host of the group cannot be reached: no packet for %d ms", silent_ms)
                    self._connection.shutdown(socket.SHUT_RDWR)
                    return


def connect(address: str, port: int, token: str, node: int, timeout_s: float) -> Link:
    """Connect to rank 0's host as host number `node`.

    Raises:
        OSError: The address does not answer.
        LinkError: Who answers is not of this group, or does not take this host for one.
    """
    connection = socket.create_connection((address, port), timeout=timeout_s)
    try:
        connection.settimeout(_HANDSHAKE_S)
        hello = _HELLO.pack(_MAGIC, node, secrets.token_bytes(32))
        connection.sendall(hello)
        transcript = hello + _read(connection, 32)
        if not hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(token, b"rank 0", transcript)):
            raise LinkError(f"who answers at {address}:{port} does not know the token of this group", is_final=True)
        connection.sendall(_proof(token, b"node", transcript))
        if _read(connection, 1) != _ACCEPTED:
            raise LinkError(f"rank 0 at {address}:{port} has another host number {node}, or none")
    except BaseException:
        connection.close()
        raise
    return Link(connection, _proof(token, b"to rank 0", transcript), _proof(token, b"to node", transcript))


class LinkListener:
    """Where the other hosts connect to.

    `admit` is called with a host's number and the link to it, on a thread of its own; it says whether it is wanted.
    """

    def __init__(self, address: str, port: int, token: str, admit: Callable[[int, Link], bool]) -> None:
        """Listen at one address, and at no other; `OSError` if the port cannot be used."""
        self._listener = socket.create_server((address, port))
        self._token = token
        self._admit = admit
        self._num_strangers = threading.Semaphore(_MAX_STRANGERS)
        threading.Thread(target=self._listen, name="hosts", daemon=True).start()

    @property
    def port(self) -> int:
        """The port."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return
            if not self._num_strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection, peer[0]), daemon=True).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._num_strangers.release)
                stack.callback(connection.close)
                node, link = self._handshake(connection)
                # The host has been told already, so messages of `admit` come behind that.
                if not self._admit(node, link):
                    link.close()
                    raise LinkError(f"host {node} is not one of this group, or connected already")
                stack.pop_all()
                self._num_strangers.release()
        except (OSError, LinkError) as error:
            _log.warning("refused a connection of %s to the group of ranks: %s", peer, error)

    def _handshake(self, connection: socket.socket) -> tuple[int, Link]:
        connection.settimeout(_HANDSHAKE_S)
        hello = _read(connection, _HELLO.size)
        magic, node, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise LinkError("it does not speak the language of ranks, or that of another version")
        nonce = secrets.token_bytes(32)
        transcript = hello + nonce
        connection.sendall(nonce + _proof(self._token, b"rank 0", transcript))
        if not hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(self._token, b"node", transcript)):
            raise LinkError("it does not know the token of this group")
        connection.sendall(_ACCEPTED)
        token = self._token
        return node, Link(connection, _proof(token, b"to node", transcript), _proof(token, b"to rank 0", transcript))


def _proof(token: str, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token.encode(), role + b"\0" + transcript, "sha256")


def _code(key: bytes, number: int, message: bytes) -> bytes:
    digest = hashlib.blake2b(struct.pack("<Q", number), key=key, digest_size=_CODE_BYTES)
    digest.update(message)
    return digest.digest()


def _read(connection: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes."""
    data = b""
    while len(data) < count:
        if not (piece := connection.recv(count - len(data))):
            raise LinkError("it hung up")
        data += piece
    return data
