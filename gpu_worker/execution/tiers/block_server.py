"""Sends leased contents to workers that decode, over TCP: a thread accepts, and one serves each connection.

Only contents that a lease names are sent, and only to who knows its token. Connections are few, and end with their
lease. What a client sends is short, and comes at once.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from gpu_worker.execution.tiers.file_format import Maker
from gpu_worker.execution.tiers.leases import Lease, Leases
from gpu_worker.execution.tiers.peer_wire import (
    FRAME_S,
    ITEM,
    MAX_REQUEST_BYTES,
    VERSION,
    Kind,
    Opening,
    PeerError,
    receive_frame,
    send_frame,
)
from shared.errors import ConfigError
from shared.log_limit import LogLimit

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
"""Where these are taken, a new one gets the place of the oldest that has not opened a lease."""
_BACKLOG = 1024
"""More that are not accepted yet would be dropped, and be tried again only after a second."""
OPEN_S = 2.0
"""A connection that has not opened a lease after so long is closed."""
FILL_S = 0.5
"""Contents of a GPU may still be on their way to the host when they are asked for; the client waits for a second."""
_FILL_POLL_S = 0.002


class BlockServer:
    """Listens as long as the process lives.

    Attributes:
        address: Where others find it, `host:port`.
    """

    def __init__(self, address: str, leases: Leases, maker: Callable[[], Maker | None]) -> None:
        """Listen; `maker` returns None before the weights' digest is known.

        Raises:
            ConfigError: The address cannot be used.
        """
        host, port = split_address(address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError("HEADRACE_KV_ADDRESS", f"{address} cannot be listened on: {error.strerror}") from None
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._socket.getsockname()[1]}"
        self._leases = leases
        self._maker = maker
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        # Those that have opened no lease yet, the oldest first.
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._log_limit = LogLimit(_log)
        threading.Thread(target=self._accept, name="kv-server", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                # Of one connection, or no file is left: others may come.
                time.sleep(0.05)
                continue
            if not self._places.acquire(blocking=False) and not self._take_place():
                connection.close()
                continue
            with self._lock:
                self._strangers[connection] = None
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kv-serve", daemon=True).start()
            except RuntimeError:
                self._end(connection)

    def _take_place(self) -> bool:
        """Cut off the oldest connection without a lease; return whether its place was got."""
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            del self._strangers[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        return self._places.acquire(timeout=FRAME_S)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            connection.close()
        self._places.release()

    def _serve(self, connection: socket.socket) -> None:
        lease = None
        was_read = False
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            maker = self._maker()
            lease = None if maker is None else self._open(connection)
            if lease is None or maker is None:
                send_frame(connection, Kind.REFUSED)
                return
            send_frame(connection, Kind.CONTENTS, b"".join(ITEM.pack(*name) for name in lease.rows))
            while self._answer(connection, lease, maker):
                pass
            was_read = True
        except OSError as error:
            self._log_limit.warning("serve", "KV is not read to the end by another worker: %s", error)
        except Exception:
            _log.exception("KV could not be sent to another worker")
        finally:
            if lease is not None:
                self._leases.end(lease, was_read=was_read)
            self._end(connection)

    def _open(self, connection: socket.socket) -> Lease | None:
        kind, body = receive_frame(connection, MAX_REQUEST_BYTES, OPEN_S)
        if kind is not Kind.OPEN:
            raise PeerError(f"a connection begins with a frame {kind.name}")
        try:
            opening = msgspec.msgpack.decode(body, type=Opening)
        except msgspec.MsgspecError as error:
            raise PeerError(f"a frame OPEN is not one: {error}") from None
        with self._lock:
            # A lease that is opened on a connection that was cut off would be lost.
            if connection not in self._strangers:
                raise PeerError("the connection was cut off for another")
            del self._strangers[connection]
        if opening.version != VERSION:
            return None
        return self._leases.open(opening.lease, opening.request, opening.epoch, connection)

    def _answer(self, connection: socket.socket, lease: Lease, maker: Maker) -> bool:
        """Answer a frame; return False after the last."""
        kind, body = receive_frame(connection, MAX_REQUEST_BYTES, max(0.0, lease.ends_at - time.monotonic()))
        if kind is Kind.DONE:
            return False
        if kind is not Kind.GET or len(body) != ITEM.size:
            raise PeerError(f"a frame {kind.name} of {len(body)} bytes does not belong here")
        group, digest = ITEM.unpack(body)
        if (group, digest) not in lease.rows:
            raise PeerError("a content is wanted that its lease does not name")
        if not self._is_filled(group, digest):
            send_frame(connection, Kind.MISSING)
            return True
        with self._leases.host.pinned(group, digest) as row:
            if row is None:
                send_frame(connection, Kind.MISSING)
                return True
            payload = row.data
            send_frame(connection, Kind.BLOCK, maker.header(group, digest, lease.salt, payload), payload)
            self._leases.counts.sent_bytes += len(payload)
        return True

    def _is_filled(self, group: int, digest: bytes) -> bool:
        host, deadline = self._leases.host, time.monotonic() + FILL_S
        while not host.has(group, digest):
            if not host.knows(group, digest) or time.monotonic() > deadline:
                return False
            time.sleep(_FILL_POLL_S)
        return True


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`, or of a host alone: any free port.

    Raises:
        ConfigError: It is not an address, or it is the wildcard address, which peers cannot connect to.
    """
    host, port = address, "0"
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        port = port.removeprefix(":") or "0"
    elif address.count(":") == 1:
        host, _, port = address.partition(":")
    if not host or host in ("0.0.0.0", "::", "*") or not port.isdigit() or int(port) > 65_535:
        problem = "is no HOST or HOST:PORT by which other workers find this one"
        raise ConfigError("HEADRACE_KV_ADDRESS", f"{address!r} {problem}")
    return host, int(port)
