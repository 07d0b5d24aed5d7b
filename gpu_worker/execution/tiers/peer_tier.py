"""The tier of other workers: contents that they keep for requests which go on here, fetched and verified.

A session is opened for a request before it enters the engine, and closed when its first token is here. Nothing that is
wrong, late or missing does harm: it is computed. Only `open` and `read` wait, for about a second at most.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from gpu_worker.execution.memory.block_bytes import Bytes
from gpu_worker.execution.tiers import peer_wire, shared_memory
from gpu_worker.execution.tiers.block_server import split_address
from gpu_worker.execution.tiers.file_format import Maker
from gpu_worker.execution.tiers.nixl_transport import MAX_DESCRIPTION_BYTES, NixlAgent, NixlError, NixlReceiver
from gpu_worker.execution.tiers.peer_wire import ITEM, Kind, Name, PeerError, SlowPeerError, receive_frame, send_frame
from shared.errors import ConfigError
from shared.log_limit import LogLimit
from shared.messages import encode

_log = logging.getLogger(__name__)

CONNECT_S = 1.0
DISTRUST_S = 5.0
"""Seconds for which a worker that did not answer is not asked, wherever it says that it is found."""
HANG_S = 0.5
"""A read that takes longer is why a load makes no progress."""
_NUM_VERIFYING = 4
"""Threads that verify contents at once. More may wait for contents, and would keep the engine from the interpreter."""
WITHOUT_NIXL_S = 60.0
"""Seconds for which KV comes over TCP from a worker whose memory NIXL could not read."""
MAX_SESSIONS = 64
_MAX_TOLD = 256


class PeerSession:
    """A connection on which one lease is read. Several threads may have a `get` on its way."""

    def __init__(
        self,
        connection: socket.socket,
        receiver: peer_wire.Receiver,
        contents: frozenset[Name],
        worker: str,
        address: str,
    ) -> None:
        self.contents = contents
        self.worker = worker
        self.address = address
        self.is_closed = False
        self._connection = connection
        self._receiver = receiver
        self.way = receiver.way
        self._lock = threading.Lock()
        # Names to request; names requested, in this order; and received contents.
        self._expected: deque[Name] = deque()
        self._asked: deque[Name] = deque()
        self._received: dict[Name, object | None] = {}
        # When all that was asked for has to be here, although each content has time of its own.
        self._due_at = 0.0

    def expect(self, names: Iterable[Name]) -> None:
        """Ask for these contents as soon as one of them is wanted: they come without a round trip for each."""
        self._expected.extend(names)

    def forget(self, names: Iterable[Name]) -> None:
        """Drop unwanted contents, and take requested ones off the wire; `OSError` if that is broken."""
        dropped = set(names)
        try:
            with self._lock:
                # Others may append meanwhile.
                for _ in range(len(self._expected)):
                    if (name := self._expected.popleft()) not in dropped:
                        self._expected.append(name)
                # Threads that load for others wait here: what does not come at once is not worth the session.
                self._due_at = min(self._due_at, time.monotonic() + peer_wire.FRAME_S)
                while self._asked and not self.is_closed:
                    self._take_in()
                for name in dropped:
                    self._received.pop(name, None)
        except OSError:
            if not self.is_closed:
                self.close()
                raise

    def get(self, name: Name) -> bytearray | None:
        """Return a content with its header, unverified; None if there is none, or the session was closed meanwhile.

        Raises:
            OSError: The wire is broken, which closes the session: one call raises it.
        """
        try:
            with self._lock:
                while name not in self._received:
                    if self.is_closed:
                        return None
                    self._receive(name)
                received = self._received.pop(name)
            return None if received is None else self._receiver.content(name[0], received)
        except OSError:
            if self.is_closed:
                return None
            self.close()
            raise

    def _receive(self, name: Name) -> None:
        if name not in self._asked:
            asked = {name: None}
            while self._expected and len(asked) < peer_wire.MAX_ASKED:
                later = self._expected.popleft()
                if later not in self._asked and later not in self._received:
                    asked[later] = None
            send_frame(self._connection, Kind.GET, b"".join(ITEM.pack(*each) for each in asked))
            self._asked.extend(asked)
            self._due_at = time.monotonic() + peer_wire.MOST_FRAME_S
        self._take_in()

    def _take_in(self) -> None:
        if time.monotonic() > self._due_at:
            raise SlowPeerError("the other side is too slow")
        for each in self._receiver.receive(self._asked):
            self._received[self._asked.popleft()] = each

    def close(self, *, is_done: bool = False) -> None:
        """Close the connection; if it `is_done`, tell the other side that all contents were read."""
        if self.is_closed:
            return
        self.is_closed = True
        with suppress(OSError):
            if is_done:
                send_frame(self._connection, Kind.DONE)
            self._connection.shutdown(socket.SHUT_RDWR)
        # A receiving thread ends now.
        has_lock = self._lock.acquire(timeout=peer_wire.FRAME_S)
        self._connection.close()
        self._receiver.close()
        if has_lock:
            self._lock.release()


class PeerTier:
    """Owns the sessions, by the attempts that they are of.

    Attributes:
        maker: What computes here, as soon as the weights' digest is known.
        num_refused: Contents that were not what they had to be.
        num_failed: Leases that could not be opened, and connections that broke.
    """

    def __init__(self, rows: list[int], block_tokens: int, nixl: NixlAgent | None = None) -> None:
        """Read contents of `rows[group]` bytes, each of at least `block_tokens` tokens."""
        self.maker: Maker | None = None
        self._rows, self._block_tokens = rows, block_tokens
        # By request and epoch: an attempt that opens late must not end the next one's session.
        self._sessions: dict[tuple[str, int], PeerSession] = {}
        self._nixl = nixl
        self._has_ended = False
        self._distrusted: dict[str, float] = {}
        self._without_nixl: dict[str, float] = {}
        # By address, how its KV comes, as the log says.
        self._told: dict[str, str] = {}
        # By thread, which session it reads, and since when.
        self._reading: dict[int, tuple[PeerSession, float]] = {}
        self._verifying = threading.Semaphore(_NUM_VERIFYING)
        self._log_limit, self._lock = LogLimit(_log), threading.Lock()
        self.num_refused = self.num_failed = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, worker: str, address: str, lease: str, request: str, epoch: int, num_tokens: int) -> bool:
        """Open a lease for an attempt of a request of this many tokens; return whether there is something to fetch."""
        now = time.monotonic()
        if self.maker is None or len(self._sessions) >= MAX_SESSIONS or self._distrusted.get(worker, 0.0) > now:
            return False
        try:
            most_contents = len(self._rows) * (1 + num_tokens // self._block_tokens)
            nixl = self._nixl if self._without_nixl.get(worker, 0.0) <= now else None
            opening = encode(peer_wire.Opening(peer_wire.VERSION, lease, request, epoch, has_nixl=nixl is not None))
            session = _open(worker, address, opening, self._rows, most_contents, nixl)
        except (OSError, ValueError, ConfigError) as error:
            # The address is what a heartbeat says.
            self._failed(worker, address, error)
            if not isinstance(error, PeerError):
                self._distrust(worker)
            return False
        with self._lock:
            before = session if self._has_ended else self._sessions.pop((request, epoch), None)
            if not self._has_ended:
                self._sessions[request, epoch] = session
                self._tell_way(address, session.way)
        if before is not None:
            before.close()
        return before is not session

    def close(self, request: str, epoch: int, *, is_done: bool = False) -> None:
        """Close the session of an attempt, if it has one; the other side frees what it has kept."""
        with self._lock:
            session = self._sessions.pop((request, epoch), None)
        if session is not None:
            session.close(is_done=is_done)

    def expect(self, names: Iterable[Name]) -> None:
        """Take note of the contents that are going to be read, in this order."""
        for name in names:
            if (session := self._find(*name)) is not None:
                session.expect((name,))

    def forget(self, names: Iterable[Name]) -> None:
        """Drop contents of `expect` that were not read: the load that wanted them has ended."""
        names = list(names)
        for session in list(self._sessions.values()):
            if not session.is_closed and not session.contents.isdisjoint(names):
                try:
                    session.forget(names)
                except OSError as error:
                    self._failed(session.worker, session.address, error)

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether the content can be fetched."""
        return self._find(group, digest) is not None

    def read(self, group: int, digest: bytes, salt: bytes) -> Bytes | None:
        """Return a content that was verified; None where there is none. A session with a wrong one is closed."""
        session, maker = self._find(group, digest), self.maker
        if session is None or maker is None:
            return None
        thread = threading.get_ident()
        self._reading[thread] = session, time.monotonic()
        try:
            data = session.get((group, digest))
        except OSError as error:
            self._failed(session.worker, session.address, error)
            return None
        finally:
            del self._reading[thread]
        if data is None:
            return None
        with self._verifying:
            payload = maker.payload(data, group, digest, salt, self._rows[group])
        if payload is None:
            self.num_refused += 1
            text = "KV from %s is damaged, or does not match the request; the prompt is computed"
            self._log_limit.warning("refused", text, session.address)
            session.close()
            return None
        return np.frombuffer(payload, dtype=np.uint8)

    def suspend(self) -> bool:
        """Close the sessions that hang, and leave their workers alone for a while; return whether there is any session.

        The others are read by threads of their own loads.
        """
        now = time.monotonic()
        for session in {session for session, since in list(self._reading.values()) if now - since > HANG_S}:
            self._failed(session.worker, session.address, SlowPeerError("the other side is too slow"))
            session.close()
        return bool(self._sessions)

    def end(self) -> None:
        """Close all sessions, and open no more."""
        with self._lock:
            self._has_ended = True
            sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.close()

    def _find(self, group: int, digest: bytes) -> PeerSession | None:
        name = (group, digest)
        for session in list(self._sessions.values()):
            if name in session.contents and not session.is_closed:
                return session
        return None

    def _tell_way(self, address: str, way: str) -> None:
        if self._told.get(address) != way:
            if len(self._told) >= _MAX_TOLD:
                self._told.clear()
            self._told[address] = way
            _log.info("KV of %s is %s", address, way)

    def _distrust(self, worker: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._distrusted = {name: until for name, until in self._distrusted.items() if until > now}
            self._distrusted[worker] = now + DISTRUST_S

    def _failed(self, worker: str, address: str, error: Exception) -> None:
        if isinstance(error, SlowPeerError):
            self._distrust(worker)
        now = time.monotonic()
        with self._lock:
            self.num_failed += 1
            if isinstance(error, NixlError):
                self._without_nixl = {name: until for name, until in self._without_nixl.items() if until > now}
                self._without_nixl[worker] = now + WITHOUT_NIXL_S
            self._log_limit.warning(
                "failed", "KV cannot be fetched from %s: %s; the prompt is computed", address, error
            )


def _open(
    worker: str, address: str, opening: bytes, rows: list[int], most_contents: int, nixl: NixlAgent | None
) -> PeerSession:
    host, port = split_address(address)
    # `ValueError` if it is a name: to look one up may take as long as its domain's servers like.
    ipaddress.ip_address(host)
    local = shared_memory.connect(address, CONNECT_S)
    connection = local or socket.create_connection((host, port), timeout=CONNECT_S)
    receiver = peer_wire.SharedReceiver(connection, rows) if local else peer_wire.Receiver(connection, rows)
    try:
        if local is None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_frame(connection, Kind.OPEN, opening)
        receiver.begin()
        most_bytes = most_contents * ITEM.size
        most_first = most_bytes if local or nixl is None else max(most_bytes, MAX_DESCRIPTION_BYTES)
        kind, body = receive_frame(connection, most_first)
        if kind is Kind.NIXL and nixl is not None and local is None:
            receiver = NixlReceiver(connection, rows, nixl, nixl.connect(bytes(body)))
            kind, body = receive_frame(connection, most_bytes)
        if kind is not Kind.CONTENTS or len(body) % ITEM.size or len(body) > most_bytes:
            raise PeerError("the lease is not known there, or over")
        return PeerSession(connection, receiver, frozenset(ITEM.iter_unpack(body)), worker, address)
    except BaseException:
        receiver.close()
        connection.close()
        raise
