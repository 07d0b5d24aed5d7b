"""Sends leased contents to workers that decode: a thread accepts at each socket, and one serves each connection.

Only contents that a lease names are sent, and only to who knows its token. Connections are few, and end with their
lease. What a client sends is short, and comes at once.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from gpu_worker.execution.tiers import peer_wire, shared_memory
from gpu_worker.execution.tiers.file_format import Maker
from gpu_worker.execution.tiers.leases import Lease, Leases
from gpu_worker.execution.tiers.nixl_transport import NixlAgent, NixlSender
from gpu_worker.execution.tiers.peer_wire import (
    ITEM,
    Kind,
    Name,
    PeerClosedError,
    PeerError,
    receive_frame,
    send_frame,
)
from shared.errors import ConfigError
from shared.log_limit import LogLimit

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
"""Where these are taken, a new one gets the place of the oldest that has not opened a lease, of the network's first."""
_BACKLOG = 1024
"""More that are not accepted yet would be dropped, and be tried again only after a second."""
OPEN_S = 2.0
"""Seconds after which a connection without an open lease is closed."""
FILL_S = 0.5
"""Contents of a GPU may still be on their way to the host when they are asked for; the client waits for a second."""
_FILL_POLL_S = 0.002


class BlockServer:
    """Listens as long as the process lives.

    Processes of this host and user that look for the address read the host tier's memory instead, if it is shared, and
    workers of other hosts where both have NIXL.

    Attributes:
        address: Where others find it: an IP address and a port, since to look up a name may take long.
    """

    def __init__(
        self, address: str, leases: Leases, maker: Callable[[], Maker | None], nixl: NixlAgent | None = None
    ) -> None:
        """Listen; `maker` is None before the weights' digest is known. `ConfigError` if the address cannot be used."""
        host, port = split_address(address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError("HEADRACE_KV_ADDRESS", f"{address} cannot be listened on: {error.strerror}") from None
        number, port = server.getsockname()[:2]
        self.address = f"[{number}]:{port}" if ":" in number else f"{number}:{port}"
        self._leases = leases
        self._maker = maker
        self._nixl = nixl
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        # Those that have opened no lease yet, the oldest first.
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._log_limit = LogLimit(_log)
        local = None if leases.host.file is None else shared_memory.listen(self.address, _BACKLOG)
        self._sockets = [server] if local is None else [server, local]
        for each in self._sockets:
            threading.Thread(target=self._accept, args=(each,), name="kv-server", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections, and end those that have opened no lease."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        with self._lock:
            for stranger in self._strangers:
                with suppress(OSError):
                    stranger.shutdown(socket.SHUT_RDWR)

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                if server.fileno() < 0:
                    return
                # Of one connection, or no file is left: others may come.
                time.sleep(0.05)
                continue
            if _is_local(connection) and not shared_memory.is_own_user(connection):
                # Before it takes the place of another.
                connection.close()
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
            # Connections of this host are at another socket: one that is new there may not have sent its lease yet.
            oldest = min(self._strangers, key=_is_local, default=None)
            if oldest is None:
                return False
            del self._strangers[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        return self._places.acquire(timeout=peer_wire.FRAME_S)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            connection.close()
        self._places.release()

    def _serve(self, connection: socket.socket) -> None:
        lease = None
        was_read = False
        try:
            maker = self._maker()
            opened = None if maker is None else self._open(connection)
            if opened is None or maker is None:
                send_frame(connection, Kind.REFUSED)
                return
            lease, sender = opened
            sender.begin()
            send_frame(connection, Kind.CONTENTS, b"".join(ITEM.pack(*name) for name in lease.rows))
            while (names := _asked(connection, lease, sender)) is not None:
                sender.send(self._find(names, lease, maker))
            was_read = True
        except OSError as error:
            # A connection also ends where the request is cancelled. A reader that fails logs that itself.
            has_closed = isinstance(error, (PeerClosedError, ConnectionError))
            if not has_closed or (lease is not None and time.monotonic() >= lease.ends_at):
                self._log_limit.warning("serve", "KV is not read to the end by another worker: %s", error)
        except Exception:
            _log.exception("KV could not be sent to another worker")
        finally:
            if lease is not None:
                self._leases.end(lease, was_read=was_read)
            self._end(connection)

    def _open(self, connection: socket.socket) -> tuple[Lease, peer_wire.Sender] | None:
        """Return the lease that the first frame opens, and how contents go."""
        kind, body = receive_frame(connection, peer_wire.MAX_REQUEST_BYTES, OPEN_S)
        if kind is not Kind.OPEN:
            raise PeerError(f"a connection begins with a frame {kind.name}")
        try:
            opening = msgspec.msgpack.decode(body, type=peer_wire.Opening)
        except msgspec.MsgspecError as error:
            raise PeerError(f"a frame OPEN is not one: {error}") from None
        with self._lock:
            # A lease that is opened on a connection that was cut off would be lost.
            if connection not in self._strangers:
                raise PeerError("the connection was cut off for another")
            del self._strangers[connection]
        if opening.version != peer_wire.VERSION:
            return None
        lease = self._leases.open(opening.lease, opening.request, opening.epoch, connection)
        return None if lease is None else (lease, self._sender(connection, has_nixl=opening.has_nixl))

    def _sender(self, connection: socket.socket, *, has_nixl: bool) -> peer_wire.Sender:
        """Return how contents go to a connection."""
        if _is_local(connection):
            assert self._leases.host.file is not None
            return peer_wire.SharedSender(connection, self._leases.host.file)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._nixl is not None and has_nixl:
            return NixlSender(connection, self._nixl)
        return peer_wire.Sender(connection)

    def _find(self, names: list[Name], lease: Lease, maker: Maker) -> Iterator[peer_wire.Found | None]:
        host, fill_until = self._leases.host, time.monotonic() + FILL_S
        for group, digest in names:
            while not host.has(group, digest) and host.knows(group, digest) and time.monotonic() < fill_until:
                time.sleep(_FILL_POLL_S)
            with host.pinned(group, digest) as row:
                if row is None:
                    yield None
                    continue
                header = maker.header(group, digest, lease.salt, row.data)
                yield peer_wire.Found(host.place(row), header, row.data)
                self._leases.sent_bytes += row.nbytes


def _is_local(connection: socket.socket) -> bool:
    return connection.family == socket.AF_UNIX


def _asked(connection: socket.socket, lease: Lease, sender: peer_wire.Sender) -> list[Name] | None:
    """Wait for the next question; return which contents it is about, None once there are no more."""
    sender.wait(lease.ends_at - time.monotonic())
    left_s = max(0.0, lease.ends_at - time.monotonic())
    kind, body = receive_frame(connection, peer_wire.MAX_REQUEST_BYTES, left_s)
    if kind is Kind.DONE:
        return None
    if kind is not Kind.GET or not body or len(body) % ITEM.size:
        raise PeerError(f"a frame {kind.name} of {len(body)} bytes does not belong here")
    names: list[Name] = list(ITEM.iter_unpack(body))
    if not lease.rows.keys() >= set(names):
        raise PeerError("a content is wanted that its lease does not name")
    return names


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
