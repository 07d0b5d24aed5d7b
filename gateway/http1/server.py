"""Listens on a socket, looks after the deadlines of its connections, and ends in order.

Connections are accepted while there are places for them; the others wait in the kernel. An event loop's own server
accepts whatever waits, and closes what there is no file descriptor for: a burst beyond the limit of connections would
lose its connections without an answer.

A drain stops accepting, lets requests finish, tells and cuts those that take too long, and then closes the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gateway.http1.connection import Connection
from gateway.http1.connection_table import SWEEP_INTERVAL_S, ConnectionLimits, ConnectionTable
from gateway.http1.handlers import Handler, HandlerRunner
from gateway.http1.head import MAX_HEAD_BYTES
from shared.background_tasks import BackgroundTasks
from shared.certificate_files import CertificateFileError, load_certificate, validity_problem
from shared.errors import ConfigError
from shared.log_limit import LogLimit
from shared.task_supervisor import TaskSupervisor

CERT_VARIABLE = "HEADRACE_TLS_CERT_FILE"
KEY_VARIABLE = "HEADRACE_TLS_KEY_FILE"
CLIENT_CA_VARIABLE = "HEADRACE_TLS_CLIENT_CA_FILE"

_log = logging.getLogger(__name__)


def server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ssl.SSLContext | None:
    """Return the context of a server with this certificate; None where no file is given.

    Without `key`, the certificate's file contains it. Clients without a certificate of `client_ca` fail the handshake.

    Raises:
        ConfigError: A file cannot be used, or a key or authority is given without a certificate.
    """
    if cert is None:
        if key is not None or client_ca is not None:
            raise ConfigError(CERT_VARIABLE, "is required with HEADRACE_TLS_KEY_FILE or HEADRACE_TLS_CLIENT_CA_FILE")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        load_certificate(context, cert, key)
    except CertificateFileError as error:
        raise ConfigError(KEY_VARIABLE if error.is_key else CERT_VARIABLE, str(error)) from None
    if (problem := validity_problem(cert, time.time())) is not None:
        # A clock may be wrong, or the file be replaced before a client comes: it does not prevent the start.
        _log.warning("%s: clients refuse it", problem)
    if client_ca is not None:
        try:
            context.load_verify_locations(cafile=client_ca)
        except OSError as error:
            reason = "holds no certificates in PEM form" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(CLIENT_CA_VARIABLE, f"{client_ca}: {reason}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


# Connections that are accepted in one turn of the event loop, which has others to serve.
BATCH = 32
# How long none is accepted after there was no place, or no file descriptor, for one.
FULL_PAUSE_S = 0.05

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_logger = logging.getLogger(__name__)


class Acceptor:
    """Makes connections of what waits at listening sockets. Owns those whose handshake is not done."""

    def __init__(
        self, protocol: Callable[[], asyncio.BaseProtocol], num_places: Callable[[], int], handshake: dict[str, Any]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._num_places = num_places
        self._handshake = handshake
        self._joining = BackgroundTasks()
        self._log_limit = LogLimit(_logger)

    async def accept_forever(self, listener: socket.socket) -> None:
        """Accept what comes to a listening socket as soon as it comes."""
        listener.setblocking(False)
        readable = asyncio.Event()

        def wake() -> None:
            # It would be called in every turn until what waits is accepted.
            self._loop.remove_reader(listener)
            readable.set()

        try:
            while True:
                readable.clear()
                self._loop.add_reader(listener, wake)
                await readable.wait()
                if not await self.accept_waiting(listener):
                    await asyncio.sleep(FULL_PAUSE_S)
        finally:
            self._loop.remove_reader(listener)

    async def accept_waiting(self, listener: socket.socket) -> bool:
        """Accept what waits at a listening socket that does not block; return False if more waits than can be kept."""
        while num_wanted := min(BATCH, self._num_places()):
            accepted, error = _accept(listener, num_wanted)
            # Tasks of their own: a drain that ends the accepting loses none of them.
            joining = [self._joining.spawn(self._join(each)) for each in accepted]
            if joining and not self._handshake:
                await asyncio.wait(joining)
            else:
                await asyncio.sleep(0)
            if error is not None and error.errno in _EXHAUSTED:
                text = "clients wait, because no more files can be opened: raise the limit of open files (ulimit -n)"
                self._log_limit.warning("", text)
                return False
            if error is not None:
                return True
        return False

    async def _join(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a handshake that failed, or a client that is gone
            await self._loop.connect_accepted_socket(self._protocol, accepted, **self._handshake)


def _accept(listener: socket.socket, num_wanted: int) -> tuple[list[socket.socket], OSError | None]:
    """Return connections that wait, and why they are fewer than wanted: none waits, or there is no room for one."""
    accepted: list[socket.socket] = []
    while len(accepted) < num_wanted:
        try:
            accepted.append(listener.accept()[0])
        except OSError as error:
            return accepted, error
    return accepted, None


BACKLOG = 2048
DRAIN_POLL_S = 0.02
# How long a connection to a process that stands still waits for another one. An owner that runs accepts at once.
RESCUE_INTERVAL_S = 0.1
# Time for the streams that were cut to be told, and for their clients to read that.
CUT_TIMEOUT_S = 3.0


class HttpServer:
    """One listening socket and its connections."""

    def __init__(
        self,
        handler: Handler,
        limits: ConnectionLimits,
        exempt_paths: frozenset[str] = frozenset(),
        on_sweep: Callable[[ConnectionTable[Connection]], None] = lambda table: None,
        tasks: TaskSupervisor | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        # A handshake has the time of a head. It is not counted among the connections before it is done.
        handshake = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": limits.head_timeout_s}
        self._tasks = tasks or TaskSupervisor()
        self._loop = asyncio.get_running_loop()
        self.table: ConnectionTable[Connection] = ConnectionTable(limits, self._loop.time)
        self._acceptor = Acceptor(self._new_connection, lambda: self.table.num_places, handshake)
        self._runner = HandlerRunner(handler, exempt_paths)
        self._receive_buffer = memoryview(bytearray(MAX_HEAD_BYTES))
        self._on_sweep = on_sweep
        self._bound: socket.socket | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._accepting: list[asyncio.Task[None]] = []

    async def start(self, bound: socket.socket, others: Iterable[socket.socket] = ()) -> None:
        """Accept connections to a bound socket, and those that the owners of `others` leave unaccepted for a moment."""
        bound.listen(BACKLOG)
        self._bound = bound
        self._sweeping = self._tasks.start(self._sweep_forever(), "sweep of connections")
        own, rescued = self._acceptor.accept_forever(bound), self._rescue_forever([*others])
        self._accepting = [
            self._tasks.start(own, "accepting of connections"),
            self._tasks.start(rescued, "rescue of unaccepted connections"),
        ]

    async def drain(self, timeout_s: float, cut: Callable[[], None] = lambda: None) -> None:
        """Stop: let requests finish for `timeout_s`, then call `cut`, which must end those that still run."""
        assert self._bound is not None, "the server has not been started"
        self.table.drain()
        await self._stop_accepting()
        if not await self._all_finish(timeout_s):
            cut()
            await self._all_finish(CUT_TIMEOUT_S)
        await self.close()

    async def close(self) -> None:
        """Close everything now."""
        await self._stop_accepting()
        if self._sweeping is not None:
            await self._tasks.stop(self._sweeping)
        for connection in list(self.table.members):
            connection.evict()
        await self._runner.cancel_all()

    def _new_connection(self) -> Connection:
        return Connection(self.table, self._runner, self._receive_buffer)

    async def _all_finish(self, timeout_s: float) -> bool:
        """Wait until no connection is busy; return whether that was in time."""
        until = self._loop.time() + timeout_s
        while any(connection.is_busy for connection in self.table.members):
            if self._loop.time() >= until:
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            # A process that was held up reads what came meanwhile before anybody's time is up: the loop's timers run
            # before it looks at its sockets.
            for _ in range(2):
                await asyncio.sleep(0)
            self.table.sweep()
            self._on_sweep(self.table)

    async def _rescue_forever(self, others: list[socket.socket]) -> None:
        for other in others:
            other.setblocking(False)
        while others:
            await asyncio.sleep(RESCUE_INTERVAL_S)
            for other in others:
                await self._acceptor.accept_waiting(other)

    async def _stop_accepting(self) -> None:
        accepting, self._accepting = self._accepting, []
        for task in accepting:
            await self._tasks.stop(task)
        if self._bound is not None:
            # In this process; others that have the socket go on listening.
            self._bound.close()
