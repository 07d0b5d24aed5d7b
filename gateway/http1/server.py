"""Listens on a socket, looks after the deadlines of its connections, and ends in order.

A drain stops accepting, lets what runs finish, tells and cuts what takes too long, and then closes what is left.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable

from gateway.http1.accepting import Acceptor
from gateway.http1.connection import Connection
from gateway.http1.connection_table import SWEEP_INTERVAL_S, ConnectionLimits, ConnectionTable
from gateway.http1.handlers import Handler, HandlerRunner
from gateway.http1.head import MAX_HEAD_BYTES
from shared.task_supervisor import TaskSupervisor

BACKLOG = 2048
DRAIN_POLL_S = 0.02
# How long a connection to a process that stands still waits for another one. An owner that runs accepts at once.
RESCUE_INTERVAL_S = 0.1
# Time for the streams that were cut to be told, and for their clients to read that.
CUT_TIMEOUT_S = 3.0


class HttpServer:
    """One listening socket and its connections.

    Attributes:
        table: The connections.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ConnectionLimits,
        exempt_paths: frozenset[str] = frozenset(),
        on_sweep: Callable[[ConnectionTable[Connection]], None] = lambda table: None,
        tasks: TaskSupervisor | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Answer with `handler`.

        Args:
            handler: Answers one exchange.
            limits: What connections may have.
            exempt_paths: Answered on connections beyond the limit, too.
            on_sweep: Called twice a second, to count connections.
            tasks: Runs the loops of the server.
            tls: Connections speak TLS with this, and nothing else.
        """
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
        """Accept connections to a bound socket, and what the owners of `others` leave unaccepted for a moment."""
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
